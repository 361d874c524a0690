"""SGLang plans host memory as it always does, and asks ``Admission`` whether the device has room."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.schedule_policy import AddReqResult
from sglang.srt.runtime_context import get_schedule

if TYPE_CHECKING:
    from hisparse_sgl.integrations.sglang.admission import Admission


@functools.cache
def adder_class(base: type) -> type:
    """A ``PrefillAdder`` that admits a request only if its whole prompt fits on the device.

    After an answer of NO_TOKEN SGLang asks about no request until one has left: that saves looking for the
    prefix of the waiting one in each step. ``get_next_batch_to_run`` opens admission when there may be room.
    """

    class DeviceAwareAdder(base):
        @property
        def _admission(self) -> Admission:
            return self.token_to_kv_pool_allocator.coordinator.admission

        def add_one_req(self, req: Any, *args: Any, **kwargs: Any) -> Any:
            result = super().add_one_req(req, *args, **kwargs)
            if result is AddReqResult.NO_TOKEN and not self._admission.is_waiting:
                self._admission.host_is_full()
            return result

        def _select_prefill_admission(self, req: Any, **kwargs: Any) -> Any:
            admission = super()._select_prefill_admission(req, **kwargs)
            if isinstance(admission, AddReqResult):
                return admission
            return admission if self._admission.has_room(req) else AddReqResult.NO_TOKEN

        def _commit_prefill_admission(self, req: Any, admission: Any, mamba_gap_reserve: int) -> None:
            super()._commit_prefill_admission(req, admission, mamba_gap_reserve)
            self._admission.admit(req)

        def preempt_to_schedule(self, req: Any) -> bool:
            """Not for a request that would then wait for device pages: its victims come back before it does,
            and lose what they have computed in each step anew.

            To ask for room gives others hot regions, so only one that has somebody to displace does."""
            if not self._outranks_one(req):
                return False
            req.init_next_round_input(self.tree_cache)
            return self._admission.has_room(req) and super().preempt_to_schedule(req)

        def _outranks_one(self, req: Any) -> bool:
            sign = -1 if get_schedule().schedule_low_priority_values_first else 1
            least = self.priority_scheduling_preemption_threshold
            return any(sign * (req.priority - other.priority) > least for other in self.running_batch.reqs)

        def add_one_req_ignore_eos(self, req: Any) -> Any:
            """SGLang's other way in, for answers of fixed length where no prefix is shared: it selects and
            commits at once, so the device is asked first."""
            if not self._admission.has_room(req):
                return AddReqResult.NO_TOKEN
            result = super().add_one_req_ignore_eos(req)
            if self.can_run_list and self.can_run_list[-1] is req:
                self._admission.admit(req)
            return result

    return DeviceAwareAdder
