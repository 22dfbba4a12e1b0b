"""polyeps: federated learning in which every client sets its own privacy budget."""

__version__ = "0.1.0"
