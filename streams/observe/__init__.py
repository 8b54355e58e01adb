"""Views of a server for its operators: the calls that live, and the log of calls."""
