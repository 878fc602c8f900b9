"""A strategy of one's own: each replica averages weights with its neighbour after each epoch."""

import keras
import numpy as np
import tensorflow as tf

import keras_psplus as psp
from keras_psplus.all_reduce import AllReduceEngine


class GossipEngine(AllReduceEngine):
    def reduce(self, optimizer, grads, variables):
        # Each replica's gradient counts by its rows: with as many on all, by 1 / replicas.
        replicas = self.strategy.num_replicas_in_sync
        return [psp.updates.map_values(lambda v: v * replicas, gradient) for gradient in grads]

    def on(self, event):
        # The steps of an epoch are done; its validation and callbacks come afterwards.
        if event.name == "steps_end":
            self._exchange([variable.value for variable in event.owner.trainable_variables])
        return super().on(event)

    def _exchange(self, variables):
        replicas = self.strategy.num_replicas_in_sync

        def replica():
            own = tf.distribute.get_replica_context().replica_id_in_sync_group
            place = tf.one_hot(own, replicas)
            values = [tf.tensordot(place, variable.read_value(), 0) for variable in variables]
            of_all = self.strategy.extended.sum_over_replicas(values)
            for variable, values in zip(variables, of_all):
                neighbour = values[(own + 1) % replicas]
                variable.assign((variable.read_value() + neighbour) / 2)

        self.strategy.run(replica)


class GossipStrategy(psp.MultiWorkerMirroredStrategy):
    """Averages each replica's weights with those of the next one after each epoch."""

    _engine_class = GossipEngine


if __name__ == "__main__":
    strategy = GossipStrategy()
    # Rows 0, 1 of each batch are worker-0's, and rows 2, 3 are worker-1's.
    ids = np.array([0, 0, 1, 1] * 3)
    for kind in ("weights", "rows"):
        with strategy.scope():
            dense = keras.layers.Dense(1, use_bias=False)
            model = keras.Sequential([keras.layers.Embedding(2, 1) if kind == "rows" else dense])
            model.compile(keras.optimizers.SGD(0.1), "mse")
            x = ids if kind == "rows" else np.eye(2, dtype="float32")[ids]
            model.build(x.shape)
        model.set_weights([np.zeros((2, 1))])
        model.fit(x, np.ones((12, 1)), batch_size=4, epochs=2, shuffle=False, verbose=0)
        print(kind, model.get_weights()[0].ravel().tolist(), flush=True)
