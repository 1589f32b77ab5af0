"""Flower's node without the servers that its modules name: what is left out, and what is not."""

import subprocess
import sys

import pytest

pytest.importorskip("flwr")


def said(code):
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return found.stdout.split()


def test_a_node_imports_no_web_server_and_can_all_the_same():
    code = """
import sys
from farthing.deploy.flower.lean_imports import leave_out_servers
print(leave_out_servers(), leave_out_servers())
from flwr.supernode.fleet_http_connection import http_request_response
from flwr.app import Message
print(callable(http_request_response), "fastapi.applications" in sys.modules, "urllib3" in sys.modules)
import flwr, requests
print(flwr.__version__ != "", flwr.serverapp.ServerApp.__name__)  # the package itself, on demand
print(issubclass(requests.RequestException, OSError))
"""
    assert said(code) == ["True", "False", "True", "False", "False", "True", "ServerApp", "True"]


def test_where_an_import_fails_everything_is_imported_as_it_is():
    code = """
import sys
from farthing.deploy.flower import lean_imports
lean_imports._NODE = "flwr.supernode.no_such_module"
print(lean_imports.leave_out_servers(), [one for one in sys.modules if one.startswith(("flwr", "fastapi"))])
from flwr.supernode.fleet_http_connection import http_request_response
import fastapi
print(fastapi.FastAPI.__name__, type(sys.modules["flwr"]).__name__, "httpx._main" in sys.modules)
"""
    assert said(code) == ["False", "[]", "FastAPI", "module", "True"]
