"""What a model keeps for each token: rows and indexer rows by layer, and the bytes they take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from hisparse_sgl.kernels.rows import RowFormat

MAX_PAGE_SIZE = 1024


@dataclass(frozen=True)
class IndexGroup:
    """The layer that runs the indexer (`leader`) and the layers that reuse its top-k (`followers`)."""

    leader: int
    followers: tuple[int, ...] = ()

    @property
    def layers(self) -> tuple[int, ...]:
        return (self.leader, *self.followers)


@dataclass(frozen=True)
class PageBytes:
    """Bytes of one page over all layers: `parts` of the rows, `padding` behind them, `index_rows`."""

    parts: tuple[int, ...]
    padding: int
    index_rows: int

    @property
    def rows(self) -> int:
        """Bytes of the page in a row buffer: what one host page or one device page takes."""
        return sum(self.parts) + self.padding


@dataclass(frozen=True)
class CacheGroup:
    """Layers 0..num_layers-1 that share a row format.

    `tokens_per_row` tokens share one row (4 for DeepSeek V4 C4), so a page of `row.page_size` rows holds
    `row.page_size * tokens_per_row` tokens. Each row has one indexer row of `index_row_bytes` in each leader
    layer (0: no indexer). Without `host_backed` the group lies on the device only: a row for every host slot,
    with the life of that slot. Such a group needs no `index_groups`.
    """

    name: str
    num_layers: int
    row: RowFormat
    index_groups: tuple[IndexGroup, ...] = ()
    index_row_bytes: int = 0
    tokens_per_row: int = 1
    host_backed: bool = True
    _group_of: tuple[IndexGroup, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_at_least("num_layers", self.num_layers, 1, "count the layers of the group")
        _check_at_least("index_row_bytes", self.index_row_bytes, 0, "use 0 for no indexer rows")
        _check_power_of_two("tokens_per_row", self.tokens_per_row, MAX_PAGE_SIZE)
        bare = not (self.host_backed or self.index_groups)
        groups = () if bare else _groups_by_layer(self.index_groups, self.num_layers)
        object.__setattr__(self, "_group_of", groups)

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self.row.page_size * self.tokens_per_row

    @property
    def index_layers(self) -> tuple[int, ...]:
        """The layers that run the indexer, in the order of `index_groups`: each is its group's id."""
        return tuple(group.leader for group in self.index_groups)

    def group_of(self, layer: int) -> IndexGroup:
        """The index group of a layer."""
        if not 0 <= layer < len(self._group_of):
            raise ValueError(
                f"layer is {layer}, the limit is 0..{len(self._group_of) - 1}: give a layer of {self.name}"
            )
        return self._group_of[layer]

    def bytes_per_page(self) -> PageBytes:
        """Bytes of one page over all layers, by part."""
        rows = self.row.page_size
        used = rows * self.row.row_bytes
        return PageBytes(
            parts=tuple(self.num_layers * rows * part for part in self.row.parts),
            padding=self.num_layers * (self.row.page_bytes - used),
            index_rows=len(self.index_groups) * rows * self.index_row_bytes,
        )

    def bytes_per_token(self) -> float:
        """Row bytes of one token over all layers, padding included: its price in host memory."""
        return self.bytes_per_page().rows / self.page_size

    def index_bytes_per_token(self) -> float:
        """Indexer bytes of one token over all leaders: its price in device memory for as long as it lives."""
        return self.bytes_per_page().index_rows / self.page_size


@dataclass(frozen=True)
class StateGroup:
    """What the engine keeps on the device for each running request besides pages, such as a sliding window.

    Pages do not hold it. A request that resumes behind a cached prefix needs `boundary_bytes` of it as they
    were there; 0: at a page boundary it is empty.
    """

    name: str
    bytes_per_request: int
    boundary_bytes: int = 0

    def __post_init__(self) -> None:
        _check_at_least("bytes_per_request", self.bytes_per_request, 1, "leave a state of no bytes out")
        _check_at_least("boundary_bytes", self.boundary_bytes, 0, "use 0 for nothing")


class GroupBytes(NamedTuple):
    """Bytes of one group over all its layers, a page's padding shared out over its tokens.

    `place`: "host" (a row a slot in the host pool; device pages hold copies), "device" (a row a slot on the
    device), "request" (on the device, while the request runs). `reuse` says what a prefix hit finds of it:
    its "pages", the "state" kept at the boundary, or that it is "empty" there.
    """

    name: str
    place: Literal["host", "device", "request"]
    reuse: Literal["pages", "state", "empty"]
    bytes_per_token: float = 0.0
    bytes_per_request: int = 0
    boundary_bytes: int = 0


@dataclass(frozen=True)
class KVLayout:
    """All cache groups of a model; exactly one is host-backed. `page_size` is in tokens, the same in all.

    `states` is what each running request has besides pages, in memory of the engine.
    """

    groups: tuple[CacheGroup, ...]
    page_size: int
    states: tuple[StateGroup, ...] = ()

    def __post_init__(self) -> None:
        _check_power_of_two("page_size", self.page_size, MAX_PAGE_SIZE)
        names = [group.name for group in self.groups] + [state.name for state in self.states]
        if len(set(names)) != len(names):
            raise ValueError(f"groups has names {names}, the limit is one group a name: rename one")
        backed = [group.name for group in self.groups if group.host_backed]
        if len(backed) != 1:
            raise ValueError(
                f"groups has host-backed {backed}, the limit is exactly 1: set host_backed on one"
            )
        for group in self.groups:
            if group.page_size != self.page_size:
                raise ValueError(
                    f"page_size is {group.page_size} tokens in group {group.name}, the limit is "
                    f"{self.page_size}: make row.page_size * tokens_per_row equal in all groups"
                )

    @classmethod
    def single(
        cls,
        num_layers: int,
        row_parts: Sequence[int],
        page_size: int,
        index_groups: Sequence[IndexGroup],
        index_row_bytes: int,
    ) -> KVLayout:
        """The layout of a model with one kind of row, without page padding (all DSA models)."""
        _check_power_of_two("page_size", page_size, MAX_PAGE_SIZE)
        row = RowFormat.make(tuple(row_parts), page_size)
        return cls((CacheGroup("kv", num_layers, row, tuple(index_groups), index_row_bytes),), page_size)

    @property
    def host_group(self) -> CacheGroup:
        """The host-backed group: what HostPool and DevicePool hold."""
        return next(group for group in self.groups if group.host_backed)

    @property
    def device_groups(self) -> tuple[CacheGroup, ...]:
        """The groups that lie on the device only, a row for every host slot."""
        return tuple(group for group in self.groups if not group.host_backed)

    @property
    def needs_state(self) -> bool:
        """A request can resume behind a prefix only with the state that was kept there."""
        return any(state.boundary_bytes for state in self.states)

    @property
    def state_bytes(self) -> int:
        """Device bytes that one running request takes besides its pages."""
        return sum(state.bytes_per_request for state in self.states)

    def device_page_bytes(self) -> int:
        """Device bytes of every host page: its indexer rows, and its rows of groups without host memory."""
        rows = sum(group.bytes_per_page().rows for group in self.device_groups)
        return rows + sum(group.bytes_per_page().index_rows for group in self.groups)

    def bytes_by_group(self) -> list[GroupBytes]:
        """What each group costs and what a prefix hit finds of it; indexer rows as groups of their own."""
        listed: list[GroupBytes] = []
        for group in self.groups:
            place: Literal["host", "device"] = "host" if group.host_backed else "device"
            listed.append(GroupBytes(group.name, place, "pages", group.bytes_per_token()))
            if group.index_row_bytes:
                bytes_per_token = group.index_bytes_per_token()
                listed.append(GroupBytes(f"{group.name} indexer", "device", "pages", bytes_per_token))
        for state in self.states:
            listed.append(
                GroupBytes(
                    state.name,
                    "request",
                    "state" if state.boundary_bytes else "empty",
                    bytes_per_request=state.bytes_per_request,
                    boundary_bytes=state.boundary_bytes,
                )
            )
        return listed

    def group_of(self, layer: int) -> IndexGroup:
        """The index group of a layer of the host-backed group."""
        return self.host_group.group_of(layer)

    def host_bytes(self, num_host_pages: int) -> int:
        """Bytes of a HostPool."""
        return num_host_pages * self.host_group.bytes_per_page().rows

    def device_bytes(self, num_device_pages: int, num_host_pages: int) -> int:
        """Bytes of a DevicePool: its pages, and what every host page costs on the device."""
        page = self.host_group.bytes_per_page()
        return num_device_pages * page.rows + num_host_pages * self.device_page_bytes()


def group_layers(leads: Sequence[bool]) -> tuple[IndexGroup, ...]:
    """Index groups of layers of which each either leads a group or follows the leader before it.

    ValueError if there is no layer or the first one does not lead.
    """
    leaders = [layer for layer, lead in enumerate(leads) if lead]
    if leaders[:1] != [0]:
        raise ValueError(
            f"leads begins with {list(leads[:1])}, the limit is True: layer 0 must run its indexer"
        )
    ends = [*leaders[1:], len(leads)]
    return tuple(
        IndexGroup(leader, tuple(range(leader + 1, end))) for leader, end in zip(leaders, ends, strict=True)
    )


def _groups_by_layer(groups: tuple[IndexGroup, ...], num_layers: int) -> tuple[IndexGroup, ...]:
    found: dict[int, IndexGroup] = {}
    for group in groups:
        for layer in group.layers:
            if not 0 <= layer < num_layers:
                raise ValueError(
                    f"index_groups names layer {layer}, the limit is 0..{num_layers - 1}: correct the group"
                )
            if layer in found:
                raise ValueError(
                    f"index_groups names layer {layer} twice, the limit is once: keep it in one group"
                )
            found[layer] = group
        if min(group.layers) != group.leader:
            raise ValueError(
                f"index_groups has followers {group.followers} of leader {group.leader}, the limit is layers "
                "after it: the layer that runs the indexer comes first"
            )
    missing = sorted(set(range(num_layers)) - found.keys())
    if missing:
        raise ValueError(
            f"index_groups lacks layers {missing}, the limit is each of 0..{num_layers - 1} once: give a "
            "layer without followers a group of its own"
        )
    return tuple(found[layer] for layer in range(num_layers))


def _check_at_least(name: str, value: int, limit: int, fix: str) -> None:
    if value < limit:
        raise ValueError(f"{name} is {value}, the limit is >= {limit}: {fix}")


def _check_power_of_two(name: str, value: int, limit: int) -> None:
    if not 1 <= value <= limit or value & (value - 1):
        raise ValueError(f"{name} is {value}, the limit is a power of two in 1..{limit}: use one such as 64")
