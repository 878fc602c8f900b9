"""What each way of training would take, by arithmetic alone: nothing here imports TensorFlow."""
