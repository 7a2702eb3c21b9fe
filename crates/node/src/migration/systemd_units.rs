//! Systemd units, identified by control groups: the process of a unit, and the group that moves with a process.

use std::collections::BTreeSet;

use holdfast_api::control::{ErrorBody, UnitEntry};
use holdfast_sys::cgroup::{ControlGroup, ControlGroups};
use holdfast_wire::failure::{Failure, OperatorFault, Text};

use crate::failure_conversion::system_call;

/// Suffix of the control groups of units that can move.
const SERVICE_SUFFIX: &str = ".service";

/// Returns the reasons why a process's control group cannot be made here; empty if it can.
pub(super) fn group_refusals(groups: &ControlGroups, group: &ControlGroup) -> Vec<Failure> {
    match group.path().ends_with(SERVICE_SUFFIX) {
        true => {
            let obstacles = groups.creation_obstacles(group).into_iter();
            let obstacles = obstacles.map(|why| OperatorFault::ControlGroup(why.into()).into());
            obstacles.collect()
        }
        false => vec![OperatorFault::NotAServiceGroup(Text::of(group.path())).into()],
    }
}

/// Control groups of this node, and processes in them that do not belong to their units.
#[derive(Debug, Clone)]
pub(super) struct SystemdUnits {
    pub(super) cgroups: ControlGroups,
    /// Parents of processes that were moved here.
    pub(super) restorer_pids: BTreeSet<i32>,
}

impl SystemdUnits {
    /// Returns the root process of a unit.
    pub(super) fn find(&self, unit: &str) -> Result<UnitEntry, ErrorBody> {
        let refusal = |error: String, what_to_do: &str| ErrorBody {
            error,
            what_to_do: what_to_do.to_owned(),
        };
        let mut running = self
            .cgroups
            .find_by_name(unit)
            .into_iter()
            .filter_map(|group| {
                let processes = self.processes(&group);
                (!processes.is_empty()).then_some((group, processes))
            });
        let (Some((group, processes)), other) = (running.next(), running.next()) else {
            return Err(refusal(
                format!("unit {unit} has no processes on this node"),
                "name a unit that runs on this node, as `systemctl status` shows it, or a process by its PID",
            ));
        };
        if let Some((other, _)) = other {
            return Err(refusal(
                format!("there are two control groups of that name, {group} and {other}"),
                "name the process by its PID",
            ));
        }
        match ControlGroups::tree_roots(&processes)[..] {
            [pid] => Ok(UnitEntry {
                unit: unit.to_owned(),
                group,
                pid,
            }),
            _ => Err(refusal(
                format!("the processes of {group} are not one process and its children"),
                "move each by its PID; their control group stays",
            )),
        }
    }

    fn processes(&self, group: &str) -> BTreeSet<i32> {
        let processes = self.cgroups.processes(group).unwrap_or_default();
        &processes - &self.restorer_pids
    }

    /// Returns the group that moves with a tree: a unit's group, if the tree contains all its processes.
    pub(super) fn group_of(&self, tree: &[i32]) -> Result<Option<ControlGroup>, Failure> {
        let failed =
            |error: std::io::Error| system_call("cannot read the process's control group", &error);
        let Some(root) = tree.first() else {
            return Ok(None);
        };
        let Some(group) = self.cgroups.group_of(*root).map_err(failed)? else {
            return Ok(None);
        };
        let is_outside = |pid: &i32| !tree.contains(pid);
        if !group.ends_with(SERVICE_SUFFIX) || self.processes(&group).iter().any(is_outside) {
            return Ok(None);
        }
        self.cgroups.read(&group).map(Some).map_err(failed)
    }
}
