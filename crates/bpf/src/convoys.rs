//! Convoys: groups of flows that move together, with a common state that one write changes, shared with the programs.

use std::sync::atomic::{AtomicU64, Ordering};

use libbpf_rs::MapHandle;
use zerocopy::IntoBytes;

use crate::Error;
use crate::mapped::Mapped;
use crate::shared::{Convoy, FlowState, FlowValue, MAX_CONVOYS};

/// All convoys.
pub struct Convoys {
    words: Mapped<AtomicU64>,
}

impl Convoys {
    pub(crate) fn map(map: &MapHandle) -> Result<Self, Error> {
        let words = Mapped::map(map, "convoys")?;
        assert_eq!(words.len(), MAX_CONVOYS);
        Ok(Self { words })
    }

    /// Returns the state of a convoy.
    #[must_use]
    pub fn get(&self, number: u8) -> Convoy {
        zerocopy::transmute!(self.word(number).load(Ordering::Acquire))
    }

    /// Changes the state of all flows of a convoy.
    pub fn turn(&self, number: u8, convoy: Convoy) {
        let mut word = [0; size_of::<Convoy>()];
        word.copy_from_slice(convoy.as_bytes());
        self.word(number)
            .store(u64::from_ne_bytes(word), Ordering::Release);
    }

    fn word(&self, number: u8) -> &AtomicU64 {
        // SAFETY: the mapping lives as long as self; the programs read whole words.
        unsafe { self.words.at(number.into()).as_ref() }
    }
}

impl FlowValue {
    /// Returns the effective value of the flow, given the state of its convoy (`standing_of` of `c/maps.h`).
    #[must_use]
    pub fn standing(self, convoy: Convoy) -> Self {
        use FlowState::{Closing, Flushing, Leaving};
        if self.convoy == 0 || convoy.state == 0 {
            return self;
        }
        let epoch = self.epoch.wrapping_add(convoy.ahead.into());
        let is = |raw: u8, state: FlowState| raw == state as u8;
        let was_ours = is(convoy.state, Leaving) || is(convoy.state, Flushing);
        if is(self.state, Closing) && was_ours {
            return Self { epoch, ..self };
        }
        let (state, peer) = (convoy.state, convoy.peer);
        Self {
            epoch,
            state,
            peer,
            ..self
        }
    }
}
