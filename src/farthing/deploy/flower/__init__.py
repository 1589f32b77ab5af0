"""Carry messages over Flower: opaque bytes, no key, no record, no decision. Only this folder imports flwr."""
