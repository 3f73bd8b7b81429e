"""pd_serve: a language model served on Ray with prefill and decode apart."""

__version__ = "0.1.0"
