"""Models outside `fit` (other strategies', unbuilt, saved), and their parts."""
