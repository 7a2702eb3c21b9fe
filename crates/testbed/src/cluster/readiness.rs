//! Waits for a cluster that is ready.

use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use holdfast_api::control::Status;

use super::Cluster;

/// Time limit of a wait: far more than needed, for a very busy machine.
const READY_TIMEOUT: Duration = Duration::from_secs(60);
/// Further time for each node, of large groups on a small machine.
const READY_TIMEOUT_PER_NODE: Duration = Duration::from_secs(2);
/// Most restarts of a daemon during a wait; one with more counts as defective.
const STARTS_MAX: u32 = 5;

/// Waits until every daemon is connected to every other. In a group that runs itself, all nodes are in the view before.
pub fn wait_for_daemons(cluster: &Cluster) -> Result<()> {
    let others = cluster.nodes().len() - 1;
    wait_until_complete(cluster, |status| {
        let known = status.peers_total as usize;
        if cluster.is_self_running() && known != others {
            return Some(format!("knows {known} of {others} other nodes"));
        }
        let missing = status.peers_total - status.peers_connected;
        (missing > 0).then(|| format!("is not connected to {missing} other nodes"))
    })
}

/// Waits until every daemon has all services of the cluster.
pub fn wait_for_services(cluster: &Cluster) -> Result<()> {
    wait_until_complete(cluster, |status| {
        let is_served = |pool: &str| status.services.iter().any(|service| service.pool == pool);
        let mut wanted = cluster.spec().services.iter();
        let missing = wanted.find(|service| !is_served(&service.pool))?;
        Some(format!("does not serve pool {}", missing.pool))
    })
}

/// Waits until every daemon has a session of every server program.
pub fn wait_for_programs(cluster: &Cluster) -> Result<()> {
    wait_until_complete(cluster, |status| {
        let has_session = |pool: &str| {
            status
                .programs
                .iter()
                .any(|program| program.pools.iter().any(|p| p == pool))
        };
        let mut wanted = cluster
            .spec()
            .programs
            .iter()
            .map(|program| program.pool_name());
        let pool = wanted.find(|pool| !has_session(pool))?;
        Some(format!(
            "has no session with a server program of pool {pool}"
        ))
    })
}

/// Waits until the contact node places new clients of every server program at all nodes with a weight.
pub fn wait_for_placement(cluster: &Cluster) -> Result<()> {
    wait_until_complete(cluster, |status| {
        let programs = cluster.spec().programs.iter();
        let pools: Vec<&str> = programs.map(|program| program.pool_name()).collect();
        let services = status.services.iter();
        let mut served = services.filter(|service| pools.contains(&service.pool.as_str()));
        served.find_map(|service| {
            let mut nodes = service.nodes.iter();
            let without_clients = nodes.find(|node| {
                node.weight > 0 && (node.problem.is_some() || node.placed_weight == 0)
            })?;
            let (node, pool) = (&without_clients.node, &service.pool);
            Some(format!("places no new clients of pool {pool} at {node}"))
        })
    })
}

/// Waits until `find_missing` returns none for every node.
fn wait_until_complete(
    cluster: &Cluster,
    find_missing: impl Fn(&Status) -> Option<String>,
) -> Result<()> {
    let nodes = u32::from(cluster.spec().nodes);
    let timeout = READY_TIMEOUT + READY_TIMEOUT_PER_NODE * nodes;
    let deadline = Instant::now() + timeout;
    let starts: Vec<u32> = cluster.daemons.iter().map(|d| d.starts()).collect();
    for node in cluster.nodes() {
        let control = cluster.blocking_control_client(&node)?;
        loop {
            let problem = match control.run(|client| client.status()) {
                Ok(status) => match find_missing(&status) {
                    Some(problem) => problem,
                    None => break,
                },
                Err(error) => format!("does not answer: {error}"),
            };
            let mut daemons = cluster.daemons.iter().zip(&starts);
            if daemons.any(|(daemon, at_first)| {
                daemon.starts() - at_first > STARTS_MAX && daemon.is_restarted()
            }) {
                bail!("a daemon ends after every start");
            }
            if let Some(program) = cluster.programs.iter().find(|program| program.has_ended()) {
                bail!("{} on {} has ended", program.name(), program.host());
            }
            if Instant::now() > deadline {
                bail!(
                    "exceeded time: after {} s, {node} {problem}",
                    timeout.as_secs()
                );
            }
            sleep(Duration::from_millis(10));
        }
    }
    Ok(())
}
