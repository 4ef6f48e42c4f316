"""The coordinator's read-only web page: `server.py`, one static page, JSON and Prometheus metrics."""
