"""Signed binary messages between a coordinator and its guards, and the transport that carries them."""
