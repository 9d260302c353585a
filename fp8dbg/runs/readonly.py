"""Whether SQL only reads: a user's query is parsed and its tree checked against a list of what is allowed.

DuckDB's own lock (no external access, files by name) does not suffice: the parts must be reachable to be read, and a
COPY hidden in a common table expression counts as a SELECT and would overwrite them (duckdb 2.0).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import duckdb

_STATEMENTS = frozenset({"SELECT_NODE", "SET_OPERATION_NODE", "RECURSIVE_CTE_NODE", "CTE_NODE"})
_TABLE_FUNCTIONS = frozenset({"range", "generate_series", "unnest", "repeat", "json_each", "json_tree"})


def why_refused(connection: duckdb.DuckDBPyConnection, query: str) -> str:
    """Why a query may not run, as a sentence; "" if it is one statement that only reads.

    Args:
        connection: any open connection.
        query: SQL; parameters may be in it.
    """
    found = connection.execute("SELECT json_serialize_sql(CAST(? AS VARCHAR))", [query]).fetchall()
    tree = json.loads(found[0][0])
    if tree["error"]:
        if tree["error_type"] == "not implemented":
            return "Only a query that reads may run: SELECT, FROM, WITH, DESCRIBE or SUMMARIZE."
        return str(tree["error_message"])
    if len(tree["statements"]) != 1:
        return f"One statement at a time: these are {len(tree['statements'])}."
    return next(_refusals(tree["statements"]), "")


def _refusals(tree: Any) -> Iterator[str]:
    for node in _nodes(tree):
        kind = str(node.get("type", ""))
        if kind.endswith("_NODE") and kind not in _STATEMENTS:
            yield f"Only a query that reads may run: {kind.split('_')[0]} is refused."
        if kind == "TABLE_FUNCTION":
            name = str(node["function"].get("function_name", ""))
            if name not in _TABLE_FUNCTIONS:
                yield f"The table function {name!r:.100} is refused: a query reads the run's own tables."


def _nodes(tree: Any) -> Iterator[dict[str, Any]]:
    """Every object in the tree, without recursion: a query may be nested deeply."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            yield node
            waiting.extend(node.values())
        elif isinstance(node, list):
            waiting.extend(node)
