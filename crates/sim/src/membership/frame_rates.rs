//! Frames per second of a group at rest, by its size.

use super::plan::MembershipRunConfig;
use super::world::MembershipWorld;
use crate::Violation;
use crate::node_group::{FaultFrequencies, GroupRunOutcome};
use crate::time::Time;
use holdfast_proto::membership::{MembershipConfig, Standing};

/// Time that the nodes have to join.
const JOINING: Time = Time::from_micros(30_000_000);
/// Time in which frames are counted: several times as long as a server node waits between two registrations.
const MEASURED_S: u64 = 20;

/// Frames per second of a group at rest, sent and received ones together.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FrameRates {
    /// Frames of the contact node.
    pub contact_node: f64,
    /// Frames of the busiest backup.
    pub backup: f64,
    /// Frames of the busiest server node.
    pub server_node: f64,
}

/// Lets a group form without faults, and counts its frames afterwards.
///
/// # Errors
/// A violated invariant: for example, nodes that are no members in the end.
pub fn measure_frame_rates(
    voters: usize,
    server_nodes: usize,
    seed: u64,
) -> Result<FrameRates, Violation> {
    let config = MembershipRunConfig {
        voters,
        server_nodes,
        clock_drifts_ppm: vec![0; voters + server_nodes],
        impatient: false,
        hostile: false,
        failing: false,
        guest: false,
        store: false,
        faults: FaultFrequencies::NONE,
        plan: Vec::new(),
        faults_end: Time::ZERO,
        lease_deadline: JOINING,
        agreement_deadline: JOINING + Time::from_micros(MEASURED_S * 1_000_000),
        bug: None,
    };
    let mut world = MembershipWorld::new(&config, seed, false);
    for node in &mut world.nodes {
        let defaults = MembershipConfig::new(node.name.clone(), ([0; 4], 0).into(), node.role, 0);
        node.server_node_check_interval = defaults.server_node_check_interval;
    }
    world.run_until(JOINING);
    for node in &mut world.nodes {
        node.frames = 0;
    }
    let GroupRunOutcome { .. } = world.run()?;
    let most = |standing: Standing| {
        let nodes = world.nodes.iter().filter(|node| {
            let machine = node.machine.as_ref();
            machine.is_some_and(|machine| machine.standing() == standing)
        });
        let frames = nodes.map(|node| node.frames).max().unwrap_or(0);
        frames as f64 / MEASURED_S as f64
    };
    Ok(FrameRates {
        contact_node: most(Standing::ContactNode),
        backup: most(Standing::Backup),
        server_node: most(Standing::ServerNode),
    })
}
