"""Flower carries the messages: opaque bytes, no key, no record and no decision. Only this folder imports
flwr."""
