"""What a rank's part of a federation is made of, and how it is put together."""

import dataclasses

from fedmpi.aggregation.base import Aggregation
from fedmpi.aggregation.layout import Layout
from fedmpi.aggregation.sending import Sending
from fedmpi.federation.buffers import SentBuffers
from fedmpi.federation.client import Client, Server
from fedmpi.federation.private import PrivateParts
from fedmpi.federation.rows import RowStore, check_rows
from fedmpi.ground.errors import UserError
from fedmpi.ground.registry import command_name
from fedmpi.oracles.flat_module import BufferPart


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts of a `Federation`; its attributes of the same names.

    Attributes:
        server_seen_by_clients: the `Server` without the exchanged rows, which belong to the clients while they work.
        named: name -> `fedmpi.ground.part.Part`, what has facts and a state of its own.
    """

    aggregation: Aggregation
    stages: dict
    store: RowStore
    server: Server
    server_seen_by_clients: Server
    clients: list
    private: PrivateParts
    named: dict


def assemble(algorithm, link, oracles, plan, variables, sending=None, poison=False):
    """The `Parts` of this rank. Collective on the link; the arguments are those of `Federation`.

    Raises:
        UserError: if the algorithm names its rows in a wrong way, see `check_rows`.
    """
    check_rows(algorithm)
    sending, x = sending or Sending(), variables.x
    _check_alone(algorithm, sending.aggregation)
    sent = _sent_buffers(variables, in_order=bool(sending.codec) or not sending.aggregation.leaves_out_constants)
    segments = variables.segments or [slice(0, x.numel())]
    numel = len(algorithm.exchanged) * x.numel() + sent.sizes[0]
    parameters = (tuple(segments), tuple(variables.names), tuple(variables.shapes))
    kinds = {row: algorithm.kinds.get(row, "point") for row in algorithm.exchanged}
    layout = Layout(algorithm.exchanged, x.numel(), numel, x.dtype, x.device, *parameters, kinds)
    aggregation, stages = sending.opened(link, layout, oracles)
    store = RowStore(
        algorithm, x.numel(), sent, len(oracles), x.dtype, x.device, poison=poison, aggregation=aggregation
    )
    own, of_problem = store.server_rows(), (plan.num_clients, segments, x.numel(), variables.ascent)
    server = Server({**store.averaged_rows(), **own}, *of_problem)
    clients = []
    for position, (index, make_oracle) in enumerate(oracles.items()):
        client = Client(index, store.client_rows(position), algorithm.client_rows, store.work_buffers)
        client.oracle = make_oracle(client)
        clients.append(client)
    of_all = _named(aggregation, stages, clients)
    for name, part in of_all.items():
        for client in clients if part.kept_rows else ():
            part.kept_of[client.index] = {kept: store.new_rows() for kept in part.kept_rows}
            client.kept |= {f"{name}.{kept}": rows for kept, rows in part.kept_of[client.index].items()}
    server.x.copy_(x)
    if aggregation.codec or any(part.needs_start for part in (aggregation, *stages.values())):
        store.need_start()
    private = PrivateParts(store, variables, clients)
    return Parts(aggregation, stages, store, server, Server(own, *of_problem), clients, private, of_all)


def _named(aggregation, stages, clients):
    """Name -> every `Part` of this rank."""
    found = {"aggregation": aggregation, "codec": aggregation.codec}
    found |= {f"stages/{name}": stage for name, stage in stages.items()}
    found["oracle"] = clients[0].oracle.kind if clients else None
    return {name: part for name, part in found.items() if part is not None}


def _check_alone(algorithm, aggregation):
    """Raise UserError if one client's rows would become the server's, and the aggregation hides or compares rows."""
    least, is_alone = aggregation.least_clients, any(exchange.alone for exchange in algorithm.exchanges())
    if is_alone and (least > 1 or not aggregation.exposes_rows):
        does = f"needs at least {least}" if least > 1 else "hides what single clients send (exposes_rows = False)"
        raise UserError(
            f"algorithm {command_name(type(algorithm))} lets one client work alone in a part of each round, and "
            f"aggregation {command_name(type(aggregation))} {does}: expected another algorithm or aggregation"
        )


def _sent_buffers(variables, in_order):
    """The `SentBuffers` of some `Variables`."""
    x, buffers = variables.x, variables.buffers
    buffers = x.new_empty(0) if buffers is None else buffers
    whole = [BufferPart("the float buffers", 0, buffers.numel(), x.dtype)] if buffers.numel() else []
    parts = whole if variables.buffer_parts is None else variables.buffer_parts
    return SentBuffers(buffers.to(x), parts, in_order=in_order)
