//! Programs and daemons that reach their limit of open files.

use std::os::fd::AsFd;
use std::process::Command;

use crate::common::{LoadedGroup, assert_contains};
use crate::scripted_program::{ScriptedProgram, assert_data_passes, listener_in, open_connection};

/// Limit of open files, below the number that the process has open.
const FULL_LIMIT: &str = "3";

/// Lowers a process's limit of open files, and restores the limit when dropped.
struct DescriptorLimitGuard {
    pid: i32,
    soft_limit_before: String,
}

impl DescriptorLimitGuard {
    fn new(pid: i32) -> Self {
        let limits = std::fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
        let line = limits
            .lines()
            .find(|line| line.starts_with("Max open files"));
        let before = line.unwrap().split_whitespace().nth(3).unwrap().to_owned();
        set_limit(pid, FULL_LIMIT);
        Self {
            pid,
            soft_limit_before: before,
        }
    }
}

impl Drop for DescriptorLimitGuard {
    fn drop(&mut self) {
        set_limit(self.pid, &self.soft_limit_before);
    }
}

/// Sets the soft limit only.
fn set_limit(pid: i32, soft: &str) {
    let mut command = Command::new("prlimit");
    command.args(["--pid", &pid.to_string(), &format!("--nofile={soft}:")]);
    assert!(command.status().unwrap().success());
}

#[test]
fn handoff_fails_cleanly_at_descriptor_limit() {
    let Some(world) = LoadedGroup::up("full") else {
        return;
    };
    let flow = world.flow(0);
    let sessions = |world: &LoadedGroup, node: &str| {
        let directory = world.cluster.directory();
        let log = std::fs::read_to_string(directory.join(format!("{node}.holdfastd.log")));
        log.unwrap()
            .matches("a server program opened a session")
            .count()
    };
    let before = ["n2", "n3"].map(|node| sessions(&world, node));

    let acceptor_program = world.cluster.program_pid("n3", "echo").unwrap().unwrap();
    let limit_guard = DescriptorLimitGuard::new(acceptor_program);
    assert_contains(
        world.assert_stays("n2", flow, "n3"),
        &["refused", "the program has no descriptor left"],
    );
    world.assert_unharmed();
    drop(limit_guard);
    world.assert_moves("n2", flow, "n3");
    world.assert_moves("n3", flow, "n2");

    let donor = world.cluster.daemon_pid("n2").unwrap().unwrap();
    let listener = listener_in(&world, "n2", world.odd_address(), false);
    let odd_program = ScriptedProgram::open(&world, "n2");
    let (mut client, mut server, odd_flow) = open_connection(&world, &listener);
    odd_program.report_accepted(odd_flow);
    let limit_guard = DescriptorLimitGuard::new(donor);
    odd_program.hand_off(odd_flow, "n3", Some(server.as_fd()));
    assert_contains(
        odd_program.receive_kept_reason(odd_flow),
        &["the daemon has no descriptor left"],
    );
    drop(limit_guard);
    assert_data_passes(&mut client, &mut server);
    // The program's session with the daemon goes on.
    odd_program.hand_off(odd_flow, "n3", Some(server.as_fd()));
    assert_contains(
        odd_program.receive_kept_reason(odd_flow),
        &["no server program on node n3 serves"],
    );
    world.assert_unharmed();

    let acceptor = world.cluster.daemon_pid("n3").unwrap().unwrap();
    let limit_guard = DescriptorLimitGuard::new(acceptor);
    assert_contains(
        world.assert_stays("n2", flow, "n3"),
        &["Too many open files"],
    );
    drop(limit_guard);
    world.assert_unharmed();
    world.assert_moves("n2", flow, "n3");
    let after = ["n2", "n3"].map(|node| sessions(&world, node));
    assert_eq!(after, [before[0] + 1, before[1]], "a session was restarted");
    world.finish();
}
