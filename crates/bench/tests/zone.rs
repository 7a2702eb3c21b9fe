//! Tests of the zone server and its load, with which migrations are measured: the pair must itself be correct, and
//! report wrong data.

use std::time::Duration;

use holdfast_lab::Topology;
use holdfast_testbed::zone_server_lab::{DATABASE_HOST, ZoneServerLab, ZoneSpec};

/// Longest wait for any condition, with a margin for a heavily loaded machine.
const PATIENCE: Duration = Duration::from_secs(60);

fn start_zone(name: &str, connections: usize, database: bool) -> Option<ZoneServerLab> {
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
    Some(ZoneServerLab::up(&spec).unwrap())
}

#[test]
fn clients_are_served_while_memory_is_written() {
    let Some(zone) = start_zone("plain", 64, false) else {
        return;
    };
    zone.wait_for_answers(10, PATIENCE).unwrap();
    // More than one round, so that every page was checked after a write to it.
    let pages = 2 * 8 * 256 + 1;
    let lab = zone.lab();
    let write_round = lab.wait_for("every page was written twice", PATIENCE, || {
        (zone.status().ok()?.pages >= pages).then_some(())
    });
    write_round.unwrap();
    zone.check_errors().unwrap();
}

#[test]
fn every_client_notices_killed_server() {
    let Some(zone) = start_zone("killed", 8, false) else {
        return;
    };
    zone.wait_for_answers(2, PATIENCE).unwrap();
    zone.lab().kill_by_name("n1", "zone").unwrap();
    let all_noticed = zone.lab().wait_for("every client notices", PATIENCE, || {
        let mut members = zone.load.connections().iter();
        members.all(|member| member.is_broken()).then_some(())
    });
    all_noticed.unwrap();
    assert!(zone.check_errors().is_err());
}

#[test]
#[ignore = "needs mariadb-server-core: ./x test-real installs it and runs this"]
fn database_session_end_is_noticed() {
    let Some(zone) = start_zone("session", 16, true) else {
        return;
    };
    zone.wait_for_answers(10, PATIENCE).unwrap();
    let lab = zone.lab();
    let query_count = lab.wait_for("the database is queried", PATIENCE, || {
        (zone.status().ok()?.queries > 20).then_some(())
    });
    query_count.unwrap();
    zone.check_errors().unwrap();
    lab.kill_by_name(DATABASE_HOST, "mariadbd").unwrap();
    let end_noticed = lab.wait_for("the session's end is noticed", PATIENCE, || {
        (zone.status().ok()?.query_errors == 1).then_some(())
    });
    end_noticed.unwrap();
    assert!(zone.check_errors().is_err());
}
