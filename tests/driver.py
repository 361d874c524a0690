"""Random requests against a pool, every answer compared with the oracle. Hypothesis and the soak steer it."""

from __future__ import annotations

from random import Random

import numpy as np
import torch
from oracle import Record
from random_pools import CONTEXT_LEN, GROUPS, PAGE_SIZE, PLAIN, TENANTS
from world import World

from hisparse_sgl.mem_pool.layout import IndexGroup
from hisparse_sgl.radix.page_hash import ExtraKey
from hisparse_sgl.requests import Deferred


class Driver(World):
    """``act`` does one action of ``ACTIONS``, whose choices are a function of ``seed``, and checks all."""

    def act(self, action: str, seed: int) -> None:
        """One action and all checks."""
        self.seen["actions"] += 1
        getattr(self, action)(Random(seed))
        self.check()

    def admit(self, rng: Random) -> None:
        if self.retracted and rng.random() < 0.6:
            old = self.retracted.pop()
            rid, tenant, tokens = old.rid, old.tenant, old.tokens
        else:
            self.num_rids += 1
            rid, tenant = f"r{self.num_rids}", rng.choice(TENANTS)
            tokens = rng.choice(self.families)[: rng.choice((0, 8, 13, 20, 31))]
            tokens = tokens + [rng.randrange(2) for _ in range(rng.randint(1, 7))]
        least, _ = self._known(tenant, tokens)
        may_wait = len(self.running) > 0 or self.transfers.fails
        admission = self.pool.admit(rid, tokens, tenant)
        if isinstance(admission, Deferred):
            self.seen[f"admit: {admission.reason}"] += 1
            assert may_wait, f"a lone request is kept out: {admission}"
            return
        tells = rng.choice(("before", "after", "after", "seldom", "never", "never"))
        cached = admission.cached_tokens
        record = Record(rid, tenant, list(tokens), cached, len(tokens), tells, known=len(tokens))
        self.running[rid] = record
        assert cached >= least, f"{rid} finds {cached} tokens, {least} of its prefix are published"
        # Pages behind the last state are not pinned: to make room some may go before the lookup that counts.
        _, most = self._known(tenant, tokens)
        assert cached + admission.shortened_tokens >= most, (admission, most)
        if self.coordinator.needs_state:
            assert admission.state == ((tenant, tuple(tokens[:cached])) if cached else None)
        self.seen["shortened hits"] += admission.shortened_tokens > 0
        self.seen["prefix hits"] += cached > 0
        self.seen["hot admissions"] += admission.hot
        for page, end in zip(self._pages(rid), range(PAGE_SIZE, cached + 1, PAGE_SIZE), strict=True):
            self._check_shared(page, (tenant, tuple(tokens[:end])))
            record.writes += self.oracle.page_writes(page)

    def step(self, rng: Random) -> None:
        """One forward: prefill chunks, decode rows, drafts of which some are rejected."""
        query_rows = rng.randint(1, self.config.query_rows)
        order = list(self.running.values())
        rng.shuffle(order)
        for record in order:
            if rng.random() < 0.9:
                self._grow(record, query_rows, rng)
        batch = [r for r in order if r.rid in self.running and r.unwritten and rng.random() < 0.95]
        if not batch:
            self.coordinator.collect()
            return
        started = {record.rid: len(record.writes) for record in batch}
        self.pool.begin_step([record.rid for record in batch], query_rows)
        if rng.random() < 0.02:  # the forward fails
            for record in batch:
                self._end(record, rng.choice(("retract", "abort")))
            return
        self._forward(batch, query_rows, rng)
        for record in batch:
            self._keep_states(record, started[record.rid], rng)
        if rng.random() < 0.05:
            self._end(batch.pop(), rng.choice(("retract", "abort", "finish")))
        late = [record for record in batch if record.tells != "before" and rng.random() < 0.5]
        for record in batch:
            if record not in late:
                self._accept(record, started[record.rid], rng)
        self.pool.step_done()
        for record in batch:
            self.oracle.settle(record)
        for record in late:
            self._accept(record, started[record.rid], rng)
        for record in batch:
            self._tell(record, rng)
            if record.num_tokens == CONTEXT_LEN:
                self._end(record, "finish")

    def end(self, rng: Random) -> None:
        if self.running:
            record = rng.choice(list(self.running.values()))
            self._end(record, rng.choice(("finish", "finish", "abort", "retract")))

    def rewind(self, rng: Random) -> None:
        """Take back any tokens that are not published, sooner of a request with a hot region."""
        records = [record for record in self.running.values() if record.num_tokens > 0]
        if records:
            hot = [record for record in records if self._request(record.rid).hot_pages]
            record = rng.choice(hot if hot and rng.random() < 0.8 else records)
            least = max(1, self._request(record.rid).publication.published * PAGE_SIZE)
            self._rewind(record, rng.randint(min(least, record.num_tokens), record.num_tokens))

    def flush(self, rng: Random) -> None:
        if rng.random() < 0.3:
            self.pool.flush()
            self.oracle.forbid_all(self.running.values())

    def run(self, rng: Random) -> None:
        """Some copies move their bytes before they are reported, or the owner waits for one."""
        self.transfers.run(rng.choice(("to_host", "to_device")), rng.randint(1, 3))
        if rng.random() < 0.5:
            self.pool.wait()

    def land(self, rng: Random) -> None:
        for direction in ("to_host", "to_device"):
            self.transfers.land(direction, rng.choice((0, 1, 4, 30)))
        self.coordinator.collect()

    def fail(self, rng: Random) -> None:
        """The next copies fail."""
        self.transfers.failures[rng.choice(("to_host", "to_device"))] = rng.choice((0, 1, 2, 12))
        self.transfers.failure = rng.choice(("nothing", "garbage"))

    def drain(self, rng: Random) -> None:
        """End all, land all copies, flush: every page must be free then."""
        self.transfers.failures = dict.fromkeys(self.transfers.queues, 0)
        for record in list(self.running.values()):
            self._end(record, rng.choice(("finish", "abort", "retract")))
            self.check()
        for _ in range(rng.choice((0, 200))):
            if not self._land_all():
                break
        self.flush_all()
        while self._land_all():
            self.check()
        free = (self.coordinator.allocator.num_free, self.coordinator.leases.pool.num_truly_free)
        expected = (self.config.host_pages - 1, self.config.device_pages - 1)
        assert free == expected, f"{free} host and device pages are free at the end, of {expected}"
        assert not self.coordinator.gate.opened and not self.coordinator.gate.detached
        assert self.coordinator.residency.promised == 0

    def flush_all(self) -> None:
        self.pool.flush()
        self.oracle.forbid_all(self.running.values())
        self.check()

    def run_alone(self, rng: Random) -> None:
        """After ``drain``: one request gets in and decodes to its longest context, whatever was before."""
        while self.running or self.coordinator.pages.flights:
            self.drain(rng)
        self.admit(rng)
        [record] = self.running.values()
        while record.rid in self.running:
            self._grow(record, 1, rng)
            self.step(rng)
            self.check()

    def _grow(self, record: Record, query_rows: int, rng: Random) -> None:
        """Ask for slots: the next chunk of a prompt, or as many rows as the step has queries."""
        limit = record.num_prompt if record.num_tokens < record.num_prompt else CONTEXT_LEN
        chunk = (
            limit < CONTEXT_LEN or rng.random() < 0.3
        )  # else decode; the text of a next turn comes in chunks
        n = min(limit - record.num_tokens, rng.randint(1, self.longest_chunk) if chunk else query_rows)
        if n == 0:
            return
        end = record.num_tokens + n
        while len(record.tokens) < end:
            record.tokens.append(self.families[0][len(record.tokens)] if rng.random() < 0.8 else 2)
        slots = self.pool.extend(record.rid, n)
        for _ in range(30):
            if not isinstance(slots, Deferred) or len(self.running) > 1 or self.transfers.fails:
                break
            self._land_all()  # a lone request must be able to go on
            slots = self.pool.extend(record.rid, n)
        if isinstance(slots, Deferred):
            self.seen[f"extend: {slots.reason}"] += 1
            may_wait = len(self.running) > 1 or self.transfers.fails or record.unwritten
            assert may_wait, f"a lone request waits: {slots}"
            if slots.reason != "restoring" and rng.random() < 0.4:
                self._end(record, "retract")
            return
        record.num_tokens = end
        record.unwritten += slots.tolist()
        if record.tells == "before" and record.known < end:
            self.pool.append_tokens(record.rid, record.tokens[record.known : end])
            record.known = end

    def _known(self, tenant: ExtraKey, tokens: list[int]) -> tuple[int, int]:
        """Tokens of published pages that a prompt begins with: those that can be used, and all."""
        ends = range(PAGE_SIZE, len(tokens), PAGE_SIZE)
        published = set(map(self.oracle.shareable.get, self._published()))
        found = [(tenant, tuple(tokens[:end])) in published for end in ends]
        most = found.index(False) if False in found else len(found)
        if not self.coordinator.needs_state:
            return PAGE_SIZE * most, PAGE_SIZE * most
        states = set(map(self.oracle.shareable.get, self._with_states()))
        usable = [end for end in ends[:most] if (tenant, tuple(tokens[:end])) in states]
        return max(usable, default=0), PAGE_SIZE * most

    def _keep_states(self, record: Record, start: int, rng: Random) -> None:
        """Hand over the state at some of the page boundaries that a forward passed."""
        if not self.coordinator.needs_state:
            return
        for end in range((start // PAGE_SIZE + 1) * PAGE_SIZE, len(record.writes) + 1, PAGE_SIZE):
            if rng.random() < 0.5:
                state = (record.tenant, tuple(record.tokens[:end]))
                self.pool.keep_state(record.rid, end, state)
                self.oracle.kept[tuple(record.writes[end - PAGE_SIZE : end])] = state

    def _forward(self, batch: list[Record], query_rows: int, rng: Random) -> None:
        slots = torch.tensor(
            [slot for record in batch for slot in record.unwritten] + [0, 3],
            dtype=torch.int32,
            device=self.pool.device,
        )
        numbers = [self.oracle.write(record, record.unwritten) for record in batch]
        for record in batch:
            record.unwritten = []
        data = np.concatenate([*numbers, np.zeros(2, dtype=np.int64)])
        self._write_plain(slots, data)
        slots = self.pool.row_slots(slots)
        if self.share > 1 and rng.random() < 0.5:  # else rows that no token completes go to the null page
            done = slots.cpu().numpy() > 0
            slots, data = slots[self._on_device(done)], data[done]
        picked: list[tuple[IndexGroup, torch.Tensor, torch.Tensor]] = []
        for group in GROUPS:
            positions = self._positions(batch, query_rows, rng)
            rows = torch.empty(0)
            for layer in group.layers:
                self.pool.write(layer, slots, self._on_device(self.oracle.rows(data, layer)))
                if layer == group.leader:
                    self.pool.write_index(layer, slots, self._on_device(data)[:, None])
                    rows = self.pool.swap_in(layer, positions).clone()
                    picked.append((group, positions, rows))
                self.pool.pages(layer)
                self._check_rows(batch, query_rows, positions, rows, layer)
        for group, positions, rows in picked:  # rows stay where they are until the group's next call
            for layer in group.layers:
                self._check_rows(batch, query_rows, positions, rows, layer)
        for record in batch:
            self._check_prefill(record)

    def _write_plain(self, slots: torch.Tensor, data: np.ndarray) -> None:
        for group in self.pool.layout.device_groups:
            for layer in range(group.num_layers):
                rows = self.pool.group_rows(PLAIN, layer).view(torch.int64)
                rows[slots.long(), 0], rows[slots.long(), 1] = self._on_device(data), layer

    def _positions(self, batch: list[Record], query_rows: int, rng: Random) -> torch.Tensor:
        width = rng.randint(1, self.config.top_k)
        picked = []
        for record in batch:
            for _ in range(query_rows):
                many = range(record.num_tokens // self.share) or [-1]
                row = [rng.choice(many) if rng.random() < 0.9 else many[-1] for _ in range(width)]
                picked.append([p if rng.random() < 0.9 else -1 for p in row])
        return torch.tensor(picked, dtype=torch.int32, device=self.pool.device)

    def _accept(self, record: Record, start: int, rng: Random) -> None:
        """Reject some of the rows that were written behind position ``start``, if they are drafts."""
        if record.num_tokens - start > 1 and record.num_tokens > record.num_prompt and rng.random() < 0.7:
            least = max(start + 1, record.num_prompt)
            self._rewind(record, rng.randint(least, record.num_tokens))

    def _rewind(self, record: Record, num_tokens: int) -> None:
        kept = self._slots(self._request(record.rid))[len(record.writes) : num_tokens]
        self.pool.rewind(record.rid, num_tokens)
        self.seen["rewinds"] += num_tokens < record.num_tokens
        self.oracle.rewind(record, num_tokens)
        assert record.unwritten == kept.tolist()

    def _tell(self, record: Record, rng: Random) -> None:
        chance = {"before": 0.0, "after": 1.0, "seldom": 0.1, "never": 0.0}[record.tells]
        if record.known < record.num_tokens and rng.random() < chance:
            self.pool.append_tokens(record.rid, record.tokens[record.known : record.num_tokens])
            record.known = record.num_tokens
            self.oracle.settle(record)

    def _end(self, record: Record, how: str) -> None:
        published = self._published()
        getattr(self.pool, how)(record.rid)
        del self.running[record.rid]
        if how != "finish":
            self.oracle.forbid(record, self._published() if how == "retract" else published)
        if how == "retract":
            self.retracted.append(record)

    def _land_all(self) -> bool:
        """Land and take in every copy in flight. False if there was none."""
        for direction in ("to_host", "to_device"):
            self.transfers.land(direction, len(self.transfers.queues[direction]))
        landed = bool(self.transfers.landed)
        self.coordinator.collect()
        return landed
