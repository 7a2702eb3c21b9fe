//! Location of a program, and its moves between nodes.

use std::collections::BTreeMap;
use std::fs;

use anyhow::Result;
use holdfast_api::control::{MigrationStatus, PlacementRequest, ResidentProcess};

use crate::detached_program::{output_path, start_detached};
use crate::process_moves::move_process;

use super::RunningProgram;

/// Nodes in the order of the program's moves.
const NODE_ROTATION: [&str; 3] = ["n2", "n3", CONTACT_NODE];
/// Node that keeps the steering table.
const CONTACT_NODE: &str = "n1";

/// Location of the program.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ProgramLocation {
    /// Moves made so far.
    moves: usize,
    /// First process of the program, by its PID at its node.
    pid: i32,
}

impl ProgramLocation {
    fn node(self) -> &'static str {
        NODE_ROTATION[self.moves % NODE_ROTATION.len()]
    }
}

/// Returns weights that direct new clients to the first node.
pub(super) fn first_node_weights() -> BTreeMap<String, u32> {
    let weights = NODE_ROTATION.iter().zip([1, 0, 0]);
    weights
        .map(|(node, weight)| ((*node).to_owned(), weight))
        .collect()
}

impl RunningProgram {
    /// Starts the program at the first node.
    pub(super) fn start(&self, words: &[String]) -> Result<ProgramLocation> {
        let mut place = ProgramLocation::default();
        let (lab, folder) = (self.cluster.lab(), self.cluster.directory());
        place.pid = start_detached(lab, place.node(), folder, words)?;
        Ok(place)
    }

    /// Moves the program to the next node, and waits until no process of it is left at the old one.
    ///
    /// # Errors
    /// The move failed, or the program has processes at another node, too.
    pub fn move_to_next_node(&mut self) -> Result<MigrationStatus> {
        let from = self.location.node();
        let mut next = self.location;
        next.moves += 1;
        let to = next.node();
        let status = move_process(&self.cluster, self.location.pid, from, to)?;
        self.wait_until(&format!("all processes are at {to} only"), || {
            let has_left =
                self.count_processes(from)? == 0 && self.resident_processes(from)?.is_empty();
            let [process] = &self.resident_processes(to)?[..] else {
                return Ok(false);
            };
            next.pid = process.pid;
            Ok(has_left && self.count_processes(to)? == self.program.processes)
        })?;
        self.location = next;
        Ok(status)
    }

    /// Directs new clients to the program's node.
    ///
    /// # Errors
    /// The contact node refuses.
    pub fn direct_new_clients(&self) -> Result<()> {
        let here = self.location.node();
        let weights = NODE_ROTATION.map(|node| (node.to_owned(), u32::from(node == here)));
        let request = PlacementRequest {
            weights: weights.into(),
        };
        let contact = self.cluster.blocking_control_client(CONTACT_NODE)?;
        contact.run(async |client| client.set_placement(&request).await)?;
        Ok(())
    }

    fn resident_processes(&self, node: &str) -> Result<Vec<ResidentProcess>> {
        let control = self.cluster.blocking_control_client(node)?;
        Ok(control.run(async |client| client.status().await)?.residents)
    }

    /// Returns the number of the program's processes at a node.
    fn count_processes(&self, node: &str) -> Result<usize> {
        let is_it = |pid: &i32| {
            let named = fs::read_to_string(format!("/proc/{pid}/comm"));
            named.is_ok_and(|named| named.trim_end() == self.program.process)
        };
        let processes = self.cluster.lab().processes(node)?;
        Ok(processes.into_iter().filter(is_it).count())
    }

    /// Returns the ends of the logs of the program and of the daemons.
    pub(super) fn log_tails(&self) -> String {
        let output = output_path(self.cluster.directory());
        let said = fs::read_to_string(output).unwrap_or_default();
        format!(
            "--- output of the program:\n{said}\n{}",
            self.cluster.log_tails()
        )
    }
}
