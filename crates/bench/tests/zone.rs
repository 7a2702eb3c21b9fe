//! Tests of the zone server and its load, with which migrations are measured: the pair must itself be correct, and
//! report wrong data.

use std::time::Duration;

use holdfast_bench::zone::{DATABASE, Zone, ZoneSpec};
use holdfast_lab::Topology;

/// Longest wait for any condition, with a margin for a heavily loaded machine.
const PATIENCE: Duration = Duration::from_secs(60);

fn zone(name: &str, connections: usize, database: bool) -> Option<Zone> {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("skipped: a lab needs root");
        return None;
    }
    let spec = ZoneSpec {
        name: format!("zone-{name}-{}", std::process::id()),
        topology: Topology::default(),
        connections,
        memory_mib: 8,
        dirty_mib_per_s: 4,
        database,
    };
    Some(Zone::up(&spec).unwrap())
}

#[test]
fn clients_are_served_while_memory_changes() {
    let Some(zone) = zone("plain", 64, false) else {
        return;
    };
    zone.wait_for_turns(10, PATIENCE).unwrap();
    // More than one round, so that every page was checked after a write to it.
    let pages = 2 * 8 * 256 + 1;
    let lab = zone.lab();
    let round = lab.until("every page was written twice", PATIENCE, || {
        (zone.status().ok()?.pages >= pages).then_some(())
    });
    round.unwrap();
    zone.check().unwrap();
}

#[test]
fn a_killed_server_is_noticed_at_every_client() {
    let Some(zone) = zone("killed", 8, false) else {
        return;
    };
    zone.wait_for_turns(2, PATIENCE).unwrap();
    zone.lab().kill("n1", "zone").unwrap();
    let all = zone.lab().until("every client notices", PATIENCE, || {
        let mut members = zone.load.members().iter();
        members.all(|member| member.is_broken()).then_some(())
    });
    all.unwrap();
    assert!(zone.check().is_err());
}

#[test]
#[ignore = "needs mariadb-server-core: ./x test-real installs it and runs this"]
fn the_session_to_the_database_goes_on_and_its_end_is_noticed() {
    let Some(zone) = zone("session", 16, true) else {
        return;
    };
    zone.wait_for_turns(10, PATIENCE).unwrap();
    let lab = zone.lab();
    let served = lab.until("the database is asked", PATIENCE, || {
        (zone.status().ok()?.queries > 20).then_some(())
    });
    served.unwrap();
    zone.check().unwrap();
    lab.kill(DATABASE, "mariadbd").unwrap();
    let noticed = lab.until("the session's end is noticed", PATIENCE, || {
        (zone.status().ok()?.query_errors == 1).then_some(())
    });
    noticed.unwrap();
    assert!(zone.check().is_err());
}
