"""Makes OpenTelemetry's SDK ready for `--otel`, as its own environment variables say.

The SDK configures itself as it does for its own command, `opentelemetry-instrument`: exporters,
samplers, the resource and limits are those of `OTEL_…`. A server whose author has set a provider
already is left as it is.
"""

import os
from importlib import import_module
from typing import Any, Final

from streams.engine.events import Events
from streams.process.options import CannotServe
from streams.server.caller import trace_in, with_trace

NEEDED: Final = "--otel needs OpenTelemetry: pip install 'mcp-streams[otel]' opentelemetry-sdk"
EXPORTER: Final = (
    "OTEL_TRACES_EXPORTER and OTEL_METRICS_EXPORTER name exporters, by default otlp: pip install "
    "opentelemetry-exporter-otlp, or name others, such as console or none"
)
SERVICE: Final = "mcp-streams"


def trace_calls(events: Events, *, are_names_ours: bool) -> None:
    """Trace the calls that `events` tells of. See `Names`. Raises `CannotServe`."""
    _configure()
    from streams.observe.traces import Traces  # noqa: PLC0415  # as below

    Traces(with_trace, trace_in, are_names_ours=are_names_ours).listen_to(events)


def _configure() -> None:
    """Make the providers of this process, unless it has some. Raises `CannotServe`."""
    # Imported here (PLC0415): the package is optional, and takes time to load.
    try:
        from opentelemetry import trace  # noqa: PLC0415
    except ImportError:
        raise CannotServe(f"{NEEDED}.") from None
    if not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return
    try:
        configurator: Any = import_module("opentelemetry.sdk._configuration")._OTelSDKConfigurator
    except ImportError:
        raise CannotServe(f"{NEEDED}.") from None
    for signal in ("TRACES", "METRICS"):
        os.environ.setdefault(f"OTEL_{signal}_EXPORTER", "otlp")  # the specification's default
    if "service.name" not in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", ""):
        os.environ.setdefault("OTEL_SERVICE_NAME", SERVICE)
    try:
        configurator().configure()
    except Exception as error:  # of the SDK, or of any exporter
        raise CannotServe(f"--otel: {error}. {EXPORTER}.") from error
