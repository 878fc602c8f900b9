"""A strategy of one's own: replicas train alone, and average their weights after each epoch."""

import keras

import keras_psplus as psp
from keras_psplus.all_reduce import AllReduceEngine


class AveragingEngine(AllReduceEngine):
    def reduce(self, optimizer, grads, variables):
        # Each replica's gradient counts by its rows: with as many on all, by 1 / replicas.
        replicas = self.strategy.num_replicas_in_sync
        return [psp.updates.map_values(lambda v: v * replicas, gradient) for gradient in grads]

    def on(self, event):
        # The steps of an epoch are done; its validation and callbacks come afterwards.
        if event.name == "steps_end":
            self._average(event.owner)
        return super().on(event)

    def _average(self, model):
        variables = [variable.value for variable in model.trainable_variables]

        def replica():
            values = [variable.read_value() for variable in variables]
            sums = self.strategy.extended.sum_over_replicas(values)
            for variable, total in zip(variables, sums):
                variable.assign(total / self.strategy.num_replicas_in_sync)

        self.strategy.run(replica)


class EpochAveragingStrategy(psp.MultiWorkerMirroredStrategy):
    """Averages weights over replicas after each epoch."""

    _engine_class = AveragingEngine


def strategy():
    return EpochAveragingStrategy()


if __name__ == "__main__":
    import numpy as np

    strategy = strategy()
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
