"""Training on data that the workers read: metrics tell which elements were seen."""

import keras
import tensorflow as tf

from tests.parameter_server.options import options

_POLICIES = tf.data.experimental.AutoShardPolicy


class Seen(keras.metrics.Sum):
    """Adds up powers of the targets."""

    def __init__(self, power):
        super().__init__(name=f"power_{power}")
        self.power = power

    def update_state(self, y_true, y_pred, sample_weight=None):
        return super().update_state(tf.cast(y_true, "float32") ** self.power)


def of_policy(dataset, policy):
    chosen = tf.data.Options()
    chosen.experimental_distribute.auto_shard_policy = getattr(_POLICIES, policy)
    return dataset.with_options(chosen)


def numbers(folder, policy, repeat=False):
    """Those in the lines of files."""
    files = tf.data.Dataset.list_files(f"{folder}/*.txt")
    lines = files.interleave(tf.data.TextLineDataset).shuffle(30)
    lines = lines.repeat() if repeat else lines
    batches = lines.batch(4).map(lambda text: tf.strings.to_number(text)[:, None])
    return of_policy(batches.map(lambda x: (x / 1000, x)), policy)


def counting_model(strategy, steps_per_execution=1):
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        metrics = [Seen(0), Seen(1), Seen(2)]
        optimizer = keras.optimizers.SGD(0.0)
        options_of_fit = {"metrics": metrics, "steps_per_execution": steps_per_execution}
        model.compile(optimizer, "mse", **options_of_fit)
    return model


def sums(model, fitted, evaluated):
    """The sums of each epoch and of an evaluation."""
    history = model.fit(fitted, epochs=2, verbose=0).history
    seen = model.evaluate(evaluated, verbose=0, return_dict=True)
    return {name: [*history[name], seen[name]] for name in seen if name.startswith("power")}


def shared_by_policy(strategy, folder, policy, steps_per_execution):
    with options(strategy):
        model = counting_model(strategy, steps_per_execution)
        found = sums(model, numbers(folder, policy), numbers(folder, policy))
        endless = model.fit(numbers(folder, policy, True), steps_per_epoch=6, epochs=2, verbose=0)
        predicted = model.predict(numbers(folder, policy), verbose=0)
    return found | {"endless": endless.history["power_0"], "predicted": len(predicted)}


def distributed(strategy, folder):
    """Distributed by the script, by a function that makes each worker its own."""

    def make(context):
        assert context.num_replicas_in_sync == 1
        data = numbers(folder, "OFF")
        return data.shard(context.num_input_pipelines, context.input_pipeline_id)

    def data():
        return strategy.distribute_datasets_from_function(make)

    with options(strategy):
        model, own = counting_model(strategy), data()
        found = sums(model, own, data())
        validated = model.fit(own, validation_data=own, verbose=0).history
        assert validated["val_power_1"] == validated["power_1"], validated
        weights = {n: 1.0 for n in range(400)}
        weighed = model.fit(own, class_weight=weights, steps_per_epoch=3, verbose=0)
        assert weighed.history["power_0"] == [12], weighed.history
        return found | {"predicted": len(model.predict(own, verbose=0))}


def lengths_that_change(strategy):
    lengths = iter((3, 9, 2))

    def batches():
        for _ in range(next(lengths)):
            yield [[1.0]], [[1.0]]

    spec = tf.TensorSpec((1, 1))
    changing = tf.data.Dataset.from_generator(batches, output_signature=(spec, spec))
    with options(strategy):
        seen = counting_model(strategy).fit(changing, epochs=3, verbose=0).history["power_0"]
    return {"seen": seen}


def what_cannot_be_sent(strategy, folder):
    """Data of the tf.data service, which has them once, and of a lookup table."""
    service = tf.data.experimental.service
    dispatcher = service.DispatchServer()
    address = dispatcher.target.split("://")[1]
    servers = [service.WorkerServer(service.WorkerConfig(address)) for _ in range(2)]
    shuffled = tf.data.Dataset.range(1, 42).shuffle(41).batch(4)
    shuffled = shuffled.map(lambda n: (tf.cast(n, "float32")[:, None] / 1000, n[:, None])).apply(
        service.distribute("distributed_epoch", dispatcher.target, job_name="numbers")
    )
    table = keras.layers.StringLookup(vocabulary=["1", "2"])
    with_table = numbers(folder, "DATA").map(
        lambda x, y: (x, tf.cast(table(tf.strings.as_string(y)), tf.float32))
    )
    with options(strategy):
        model = counting_model(strategy)
        seen = model.fit(of_policy(shuffled, "DATA"), epochs=2, verbose=0).history
        model.fit(with_table.take(3), verbose=0)
    del servers
    return {"counts": seen["power_0"], "sums": seen["power_1"]}


# In a mode in which the chief reads. `of_worker` has 3 batches of even rows, 4 of odd ones.

ROWS, BATCH, BATCHES = 22, 4, 7


def of_worker(context):
    """The even rows for one worker; the odd ones, twice the first, for the other."""
    odd = context.input_pipeline_id
    rows = tf.data.Dataset.range(odd, ROWS, 2)
    rows = rows.concatenate(tf.data.Dataset.range(1, 3, 2)) if odd else rows
    rows = rows.concatenate(rows.take(2)) if odd else rows
    return rows.batch(BATCH).map(lambda n: (tf.ones([tf.size(n), 1]), tf.cast(n, tf.float32)))


def the_chief_reads_where_it_decides(strategy):
    with options(strategy, mode="sync"):
        with strategy.scope():
            zeros = keras.layers.Dense(1, kernel_initializer="zeros")
            model = keras.Sequential([keras.Input((1,)), zeros])
            # Of zeros, the mean absolute error is the mean of the targets.
            model.compile(keras.optimizers.SGD(0.0), "mae")
        expected, rows = sum(range(ROWS)) + 1 + 1 + 3, ROWS + 3
        data = strategy.distribute_datasets_from_function(of_worker)
        found = model.fit(data, epochs=2, verbose=0).history["loss"]
        found += [model.evaluate(data, verbose=0)]
        assert all(abs(loss - expected / rows) < 1e-4 for loss in found), found
        assert int(model.optimizer.iterations) == 2 * BATCHES, model.optimizer.iterations
        assert model.predict(data, verbose=0).shape == (rows, 1)
        whole = tf.data.Dataset.range(ROWS).batch(BATCH)
        whole = whole.map(lambda n: (tf.ones([tf.size(n), 1]), tf.cast(n, tf.float32)))
        data = strategy.experimental_distribute_dataset(whole)
        found = model.fit(data, epochs=2, validation_data=data, verbose=0).history
        for loss in found["loss"] + found["val_loss"]:
            assert abs(loss - (ROWS - 1) / 2) < 1e-4, found
