//! Flow groups: the flows of a moving process, with a common state that one write changes, shared with the eBPF programs.

use std::sync::atomic::{AtomicU64, Ordering};

use libbpf_rs::MapHandle;
use zerocopy::IntoBytes;

use crate::Error;
use crate::mapped_array::MappedArray;
use crate::shared_with_c::{FlowGroup, FlowState, FlowValue, MAX_FLOW_GROUPS};

/// Common state of the flows of each moving process, by the number of the flow group.
pub struct ProcessFlowGroups {
    words: MappedArray<AtomicU64>,
}

impl ProcessFlowGroups {
    pub(crate) fn map(map: &MapHandle) -> Result<Self, Error> {
        let words = MappedArray::map(map, "convoys")?;
        assert_eq!(words.len(), MAX_FLOW_GROUPS);
        Ok(Self { words })
    }

    /// Returns the state of a flow group.
    #[must_use]
    pub fn get(&self, number: u8) -> FlowGroup {
        zerocopy::transmute!(self.word(number).load(Ordering::Acquire))
    }

    /// Changes the state of all flows of a flow group.
    pub fn set(&self, number: u8, group: FlowGroup) {
        let mut word = [0; size_of::<FlowGroup>()];
        word.copy_from_slice(group.as_bytes());
        self.word(number)
            .store(u64::from_ne_bytes(word), Ordering::Release);
    }

    fn word(&self, number: u8) -> &AtomicU64 {
        // SAFETY: the mapping lives as long as self; the programs read whole words.
        unsafe { self.words.value_ptr(number.into()).as_ref() }
    }
}

impl FlowValue {
    /// Returns the effective value of the flow, given the state of its group (`effective_state_of` of `c/maps.h`).
    #[must_use]
    pub fn effective(self, group: FlowGroup) -> Self {
        use FlowState::{Closing, Flushing, RedirectingData};
        if self.flow_group == 0 || group.state == 0 {
            return self;
        }
        let epoch = self.epoch.wrapping_add(group.epoch_offset.into());
        let is = |raw: u8, state: FlowState| raw == state as u8;
        let was_ours = is(group.state, RedirectingData) || is(group.state, Flushing);
        if is(self.state, Closing) && was_ours {
            return Self { epoch, ..self };
        }
        let (state, peer) = (group.state, group.peer);
        Self {
            epoch,
            state,
            peer,
            ..self
        }
    }
}
