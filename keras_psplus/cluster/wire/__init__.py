"""The handshake of two tasks before TensorFlow starts."""
