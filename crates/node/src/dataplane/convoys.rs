//! Flow groups: all flows of a moving process, whose state changes with a single write.

use std::cell::RefCell;
use std::collections::VecDeque;

use holdfast_bpf::Error;
use holdfast_bpf::shared::{Convoy as All, FlowKey, FlowState, FlowValue, MAX_CONVOYS};
use holdfast_wire::{Flow, NodeId};

use super::{Dataplane, key_of};

/// A flow group of this node, or none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Convoy(u8);

impl Convoy {
    /// No group: the flow has a state of its own.
    pub const NONE: Convoy = Convoy(0);

    /// Returns the group's number in the maps.
    pub(super) fn number(self) -> u8 {
        self.0
    }
}

/// Unused group numbers. A number is reused as late as possible, because a program may still be reading its entry.
pub(super) struct Numbers(RefCell<VecDeque<u8>>);

impl Numbers {
    pub(super) fn new() -> Numbers {
        let all = 1..=u8::try_from(MAX_CONVOYS - 1).unwrap_or(u8::MAX);
        Numbers(RefCell::new(all.collect()))
    }
}

impl Dataplane {
    /// Returns a group without flows; `None` if all groups are in use.
    #[must_use]
    pub fn form(&self) -> Option<Convoy> {
        self.convoys.0.borrow_mut().pop_front().map(Convoy)
    }

    /// Adds flows of this node to a group, or with [`Convoy::NONE`] takes them out of their group. Each flow keeps its
    /// own state.
    ///
    /// # Errors
    /// The kernel refuses the change.
    pub fn join<'a>(
        &self,
        flows: impl Iterator<Item = &'a Flow>,
        convoy: Convoy,
    ) -> Result<(), Error> {
        let keys: Vec<FlowKey> = flows.map(key_of).collect();
        let joins = FlowValue {
            convoy: convoy.number(),
            ..FlowValue::default()
        };
        self.programs.set_flows(&keys, &vec![joins; keys.len()])
    }

    /// Puts all flows of a group into `state`, at epochs that are `ahead` of the flows' own.
    pub fn turn(&self, convoy: Convoy, state: FlowState, peer: NodeId, ahead: u8) {
        let all = All {
            state: state as u8,
            ahead,
            peer: peer.0,
            pad: 0,
        };
        self.set_all(convoy, all);
    }

    /// Restores each flow of a group to its own state.
    pub fn dissolve(&self, convoy: Convoy) {
        self.set_all(convoy, All::default());
    }

    /// Dissolves a group and frees its number.
    pub fn disband(&self, convoy: Convoy) {
        self.dissolve(convoy);
        if convoy != Convoy::NONE {
            self.convoys.0.borrow_mut().push_back(convoy.number());
        }
    }

    fn set_all(&self, convoy: Convoy, all: All) {
        if convoy != Convoy::NONE {
            self.programs.convoys.turn(convoy.number(), all);
        }
    }

    /// Dissolves the groups of an earlier daemon. Each flow keeps the state that its group gave it; flows of a
    /// process that was only about to stop are owned again.
    pub(super) fn dissolve_all(&self) -> Result<(), Error> {
        let by_itself = |(key, value): (FlowKey, FlowValue)| {
            let mut own = self.standing(value);
            own.convoy = Convoy::NONE.0;
            if own.state == FlowState::Leaving as u8 {
                own.state = FlowState::Owned as u8;
            }
            (key, own)
        };
        let flows = self.programs.flows.entries().into_iter();
        let (keys, values): (Vec<FlowKey>, Vec<FlowValue>) = flows
            .filter(|(_, value)| value.convoy != Convoy::NONE.0)
            .map(by_itself)
            .unzip();
        self.programs.set_flows(&keys, &values)?;
        for number in &*self.convoys.0.borrow() {
            self.dissolve(Convoy(*number));
        }
        Ok(())
    }

    /// Returns a flow's entry as the filters see it: with the state of its flow group, if any.
    pub(super) fn standing(&self, value: FlowValue) -> FlowValue {
        match value.convoy {
            0 => value,
            convoy => value.standing(self.programs.convoys.get(convoy)),
        }
    }
}
