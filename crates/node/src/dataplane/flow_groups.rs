//! Flow groups: all flows of a moving process, whose state changes with a single write.

use std::cell::RefCell;
use std::collections::VecDeque;

use holdfast_bpf::Error;
use holdfast_bpf::shared_with_c::{
    FlowGroup as GroupState, FlowKey, FlowState, FlowValue, MAX_FLOW_GROUPS,
};
use holdfast_wire::{Flow, NodeId};

use super::{Dataplane, flow_key};

/// A flow group of this node, or none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlowGroup(u8);

impl FlowGroup {
    /// No group: the flow has a state of its own.
    pub const NONE: FlowGroup = FlowGroup(0);

    /// Returns the group's number in the maps.
    pub(super) fn number(self) -> u8 {
        self.0
    }
}

/// Unused group numbers. A number is reused as late as possible, because an eBPF program may still be reading its entry.
pub(super) struct FreeGroupNumbers(RefCell<VecDeque<u8>>);

impl FreeGroupNumbers {
    pub(super) fn new() -> FreeGroupNumbers {
        let numbers = 1..=u8::try_from(MAX_FLOW_GROUPS - 1).unwrap_or(u8::MAX);
        FreeGroupNumbers(RefCell::new(numbers.collect()))
    }
}

impl Dataplane {
    /// Returns a group without flows; `None` if all groups are in use.
    #[must_use]
    pub fn create_group(&self) -> Option<FlowGroup> {
        self.free_group_numbers
            .0
            .borrow_mut()
            .pop_front()
            .map(FlowGroup)
    }

    /// Adds flows of this node to a group, or with [`FlowGroup::NONE`] takes them out of their group. Each flow keeps its
    /// own state.
    ///
    /// # Errors
    /// The kernel refuses the change.
    pub fn join_group<'a>(
        &self,
        flows: impl Iterator<Item = &'a Flow>,
        group: FlowGroup,
    ) -> Result<(), Error> {
        let keys: Vec<FlowKey> = flows.map(flow_key).collect();
        let joins = FlowValue {
            flow_group: group.number(),
            ..FlowValue::default()
        };
        self.programs.set_flows(&keys, &vec![joins; keys.len()])
    }

    /// Puts all flows of a group into `state`, at epochs `epoch_offset` above the flows' own.
    pub fn set_group_state(
        &self,
        group: FlowGroup,
        state: FlowState,
        peer: NodeId,
        epoch_offset: u8,
    ) {
        let group_override = GroupState {
            state: state as u8,
            epoch_offset,
            peer: peer.0,
            pad: 0,
        };
        self.set_group_override(group, group_override);
    }

    /// Restores each flow of a group to its own state.
    pub fn reset_group(&self, group: FlowGroup) {
        self.set_group_override(group, GroupState::default());
    }

    /// Dissolves a group and frees its number.
    pub fn remove_group(&self, group: FlowGroup) {
        self.reset_group(group);
        if group != FlowGroup::NONE {
            self.free_group_numbers
                .0
                .borrow_mut()
                .push_back(group.number());
        }
    }

    fn set_group_override(&self, group: FlowGroup, state: GroupState) {
        if group != FlowGroup::NONE {
            self.programs.flow_groups.set(group.number(), state);
        }
    }

    /// Dissolves the groups of an earlier daemon. Each flow keeps the state that its group gave it; flows of a
    /// process that was only about to stop are owned again.
    pub(super) fn reset_all_groups(&self) -> Result<(), Error> {
        let to_single_flow = |(key, value): (FlowKey, FlowValue)| {
            let mut value_of_flow = self.effective_value(value);
            value_of_flow.flow_group = FlowGroup::NONE.0;
            if value_of_flow.state == FlowState::RedirectingData as u8 {
                value_of_flow.state = FlowState::Owned as u8;
            }
            (key, value_of_flow)
        };
        let flows = self.programs.flows.entries().into_iter();
        let (keys, values): (Vec<FlowKey>, Vec<FlowValue>) = flows
            .filter(|(_, value)| value.flow_group != FlowGroup::NONE.0)
            .map(to_single_flow)
            .unzip();
        self.programs.set_flows(&keys, &values)?;
        for number in &*self.free_group_numbers.0.borrow() {
            self.reset_group(FlowGroup(*number));
        }
        Ok(())
    }

    /// Returns a flow's entry as the filters see it: with the state of its flow group, if any.
    pub(super) fn effective_value(&self, value: FlowValue) -> FlowValue {
        match value.flow_group {
            0 => value,
            group => value.effective(self.programs.flow_groups.get(group)),
        }
    }
}
