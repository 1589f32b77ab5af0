"""Export a trained model to skops and ONNX files of a scikit-learn pipeline that starts at raw columns.

Scaling and vocabularies come from the public schema, the weights from the training: nothing in a file was
learnt outside the budget. Neither format runs code when it is read.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from sklearn.compose import ColumnTransformer, TransformedTargetRegressor
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import MinMaxScaler, OneHotEncoder

from farthing.data.columns import Categorical, Column, Date, Numeric, Unbounded
from farthing.data.schema import Schema
from farthing.errors import Unsupported


def exported(form: str, schema: Schema, model: Any) -> bytes:
    """Return a file's content: the schema's encoding, then ``model``, from an estimator's `to_sklearn`."""
    return FORMATS[form](pipeline(schema, model), schema)


def pipeline(schema: Schema, model: Any) -> Pipeline:
    """Return a pipeline from a data frame with the schema's columns to labels or numbers."""
    if isinstance(model, Pipeline):  # which maps [0, 1] onto itself, and in it lies what is encoded
        model = model[-1]
    columns = list(enumerate(schema.columns))
    encode = ColumnTransformer([(f"column {place}", _encoder(column), [place]) for place, column in columns])
    # fitted on declared values: nothing is learnt
    encode.fit(np.array([_ends(column) for _, column in columns], dtype=object).T)
    names = np.array([column.name for _, column in columns], dtype=object)
    encode.feature_names_in_ = names
    for place, (_, encoder, _) in enumerate(encode.transformers_):
        encoder.feature_names_in_ = names[place : place + 1]
    if isinstance(schema.target, Categorical):
        model.classes_ = np.array(schema.target.values)
    return Pipeline([("encode", encode), ("model", model)])


def _encoder(column: Column) -> Any:
    if isinstance(column, Date | Unbounded) or len(column.feature_names) > len(
        getattr(column, "values", [0])
    ):
        raise Unsupported(
            f"--format cannot write column {column.name!r}: scikit-learn's encoders have no dates in a "
            "range, no 'missing' and no 'other'; leave --format out, and predict with model.npz"
        )
    if isinstance(column, Numeric):
        return MinMaxScaler(clip=True)
    return OneHotEncoder(categories=[np.array(column.values)], handle_unknown="ignore", sparse_output=False)


def _ends(column: Column) -> tuple[Any, Any]:
    """Return two values that stand for all that are declared."""
    if isinstance(column, Numeric):
        return float(column.low), float(column.high)
    assert isinstance(column, Categorical)
    return column.values[0], column.values[-1]


def _skops(whole: Pipeline, schema: Schema) -> bytes:
    try:
        from skops import io
    except ImportError:
        raise _missing("skops") from None
    content: bytes = io.dumps(whole)
    return content


def _onnx(whole: Pipeline, schema: Schema) -> bytes:
    try:
        from skl2onnx import to_onnx
        from skl2onnx.common.data_types import FloatTensorType, StringTensorType
    except ImportError:
        raise _missing("onnx") from None
    if isinstance(whole[-1], TransformedTargetRegressor):
        whole = Pipeline([("encode", whole[0]), ("model", _unbounded(whole[-1]))])
    kinds = {Numeric: FloatTensorType, Categorical: StringTensorType}
    inputs = [(column.name, kinds[type(column)]([None, 1])) for column in schema.columns]
    # a table of scores, one column a class, rather than a list of dictionaries
    options = {id(whole[-1]): {"zipmap": False} if isinstance(whole[-1], LogisticRegression) else {}}
    graph = to_onnx(whole, initial_types=inputs, options=options)
    if isinstance(schema.target, Numeric):
        _bounded(graph.graph, schema.target)
    content: bytes = graph.SerializeToString()
    return content


def _unbounded(model: TransformedTargetRegressor) -> Any:
    """Return the linear model in the target's own unit, without its bounds."""
    inner, (low, high) = model.regressor_[-1], model.transformer_.quantiles_.ravel()
    linear = LinearRegression()
    linear.coef_, linear.intercept_ = inner.coef_ * (high - low), inner.intercept_ * (high - low) + low
    linear.n_features_in_ = inner.n_features_in_
    return linear


def _bounded(graph: Any, target: Numeric) -> None:
    """Clip the output of a graph to the target's bounds."""
    from onnx import helper, numpy_helper

    result = graph.output[0].name
    for node in graph.node:
        for place, name in enumerate(node.output):
            if name == result:
                node.output[place] = "unbounded"
    for name in ("low", "high"):
        graph.initializer.append(
            numpy_helper.from_array(np.array(getattr(target, name), np.float32), name=f"target_{name}")
        )
    graph.node.append(helper.make_node("Clip", ["unbounded", "target_low", "target_high"], [result]))


def _missing(form: str) -> Unsupported:
    return Unsupported(f"--format {form} needs a package that is missing: pip install skops skl2onnx")


#: The formats of ``--format``: from a pipeline and its schema to the bytes of a file.
FORMATS: dict[str, Callable[[Pipeline, Schema], bytes]] = {"skops": _skops, "onnx": _onnx}
