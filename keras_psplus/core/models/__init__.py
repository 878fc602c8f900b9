"""Models outside `fit`: other strategies', unbuilt, saved."""
