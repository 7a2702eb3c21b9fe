//! Migrations of processes between the nodes of a group by their daemons, there and back. Needs root.
#![cfg(target_arch = "x86_64")]

mod acceptor_policy;
mod arena;
mod churn;
mod client_traffic;
#[path = "../common/mod.rs"]
mod common;
mod compromised_donor;
mod connections_during_move;
mod contact_loss;
mod copies;
mod counting_program;
mod daemon_capabilities;
mod database_session;
mod faults;
mod locks;
mod memory_transfer;
mod migration_check;
#[path = "../udp/numbered_datagrams.rs"]
#[allow(dead_code, reason = "these tests use a part of the module")]
mod numbered_datagrams;
mod obstacles;
mod postcopy;
mod reuseport;
mod server_faults;
mod systemd_units;
mod unaccepted_connections;
mod verified_load;
mod world;

use std::sync::{Mutex, PoisonError};

use anyhow::{Result, ensure};
use holdfast_bench::migrate::lab_topology;
use holdfast_testbed::cluster::IpFamily;

use faults::{ACCEPTOR, DONOR, Fault, HOLDER, Point, STEPS, point, sample, sample_from};
use world::MigrationGroup;

/// Rate of a link that is slower than any processor compresses, in Mbit/s.
const SLOW_MBIT: u32 = 50;

/// Serializes the tests: two groups at once would slow each other down.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Brings a group up and runs a case in it.
fn run_in_group(name: &str, case: impl FnOnce(&MigrationGroup) -> Result<()>) {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("skipped: a lab needs root");
        return;
    }
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let world = MigrationGroup::up(name).unwrap_or_else(|error| panic!("{error:#}"));
    if let Err(error) = case(&world) {
        panic!("{error:#}");
    }
}

#[test]
fn memory_transfer_overflows_no_queue() {
    run_in_group(
        "queues",
        memory_transfer::memory_transfer_overflows_no_queue,
    );
}

#[test]
fn process_migrates_there_and_back() {
    run_in_group("back", counting_program::migrate_there_and_back);
}

#[test]
fn connection_churn_does_not_delay_migration() {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("skipped: a lab needs root");
        return;
    }
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    if let Err(error) = churn::migrate_during_churn() {
        panic!("{error:#}");
    }
}

#[test]
fn freeze_time_excludes_time_before_stop_and_after_resume() {
    run_in_group("freeze", counting_program::freeze_excludes_waits);
}

/// Runs the points that contain `HOLDFAST_FAULT` in their command, or all points without this variable.
fn fail_at_points(world: &MigrationGroup, points: &[Point], fault: Fault) -> Result<()> {
    let part = std::env::var("HOLDFAST_FAULT").unwrap_or_default();
    let wanted = points.iter().filter(|at| at.command.contains(&part));
    wanted
        .copied()
        .try_for_each(|at| faults::migrate_with_fault(world, at, fault))
}

#[test]
fn process_survives_donor_daemon_crash() {
    run_in_group("donor", |world| {
        fail_at_points(world, &sample(&STEPS), Fault::Kill(DONOR))?;
        let donor_steps = [
            "move-check after",
            "move-release before",
            "move-release after",
        ];
        fail_at_points(
            world,
            &donor_steps.map(|command| point(DONOR, command)),
            Fault::Kill(DONOR),
        )
    });
}

#[test]
fn process_survives_acceptor_daemon_crash() {
    run_in_group("acceptor", |world| {
        // The steps that the donor's sample lacks.
        fail_at_points(world, &sample_from(1, &STEPS), Fault::Kill(ACCEPTOR))?;
        let acceptor_steps = ["move-build before", "move-go after"];
        fail_at_points(
            world,
            &acceptor_steps.map(|command| point(ACCEPTOR, command)),
            Fault::Kill(ACCEPTOR),
        )
    });
}

#[test]
fn process_survives_donor_acceptor_link_cut() {
    run_in_group("cut", |world| {
        // Before the freeze nothing has changed that a cut could make inconsistent: one point stands for all.
        let link_cut_points = [&STEPS[..1], &STEPS[3..]].concat();
        fail_at_points(
            world,
            &sample(&link_cut_points),
            Fault::Cut(DONOR, ACCEPTOR),
        )?;
        let donor_point = [point(DONOR, "move-freeze after")];
        fail_at_points(world, &donor_point, Fault::Cut(DONOR, HOLDER))?;
        let acceptor_point = [point(ACCEPTOR, "move-restore after")];
        fail_at_points(world, &acceptor_point, Fault::Cut(ACCEPTOR, HOLDER))
    });
}

#[test]
fn process_survives_holder_crash_or_double_crash() {
    run_in_group("holder", |world| {
        let holder_steps = ["arbitrate before", "arbitrate after"];
        fail_at_points(
            world,
            &holder_steps.map(|command| point(HOLDER, command)),
            Fault::Kill(HOLDER),
        )?;
        fail_at_points(world, &sample(&STEPS[2..]), Fault::KillBoth)
    });
}

#[test]
fn process_killed_while_migrating_ends_everywhere() {
    run_in_group("killed", |world| {
        let mut points = sample(&STEPS).into_iter();
        points.try_for_each(|at| faults::kill_process_at(world, at))
    });
}

#[test]
fn clone_runs_independently_of_original() {
    run_in_group("copy", copies::clone_runs_independently);
}

#[test]
fn original_survives_donor_daemon_crash_while_cloning() {
    run_in_group("copy-donor", |world| {
        let kill = Fault::Kill(DONOR);
        let mut points = sample(&STEPS).into_iter();
        points.try_for_each(|at| copies::clone_with_fault(world, at, kill))?;
        copies::clone_with_fault(world, point(DONOR, "move-thaw before"), kill)
    });
}

#[test]
fn original_survives_acceptor_daemon_crash_while_cloning() {
    run_in_group("copy-acceptor", |world| {
        let kill = Fault::Kill(ACCEPTOR);
        let mut points = sample_from(1, &STEPS).into_iter();
        points.try_for_each(|at| copies::clone_with_fault(world, at, kill))?;
        copies::clone_with_fault(world, point(ACCEPTOR, "move-go after"), kill)
    });
}

#[test]
fn clients_stay_with_original_while_cloning() {
    run_exclusively(|| copies::clients_stay_with_original("copied"));
}

#[test]
fn unit_cgroup_moves_with_process() {
    run_in_group("unit", systemd_units::cgroup_moves);
}

#[test]
fn failed_move_leaves_unit_cgroup_unchanged() {
    run_in_group("unit-stays", systemd_units::cgroup_stays);
}

#[test]
fn processes_reported_movable_migrate() {
    run_in_group("check", migration_check::migrate_movable_processes);
}

#[test]
fn check_reports_blockers_before_migration() {
    run_in_group("check-not", migration_check::refuse_blocked_processes);
}

#[test]
fn host_local_connections_migrate_in_any_state() {
    run_in_group("near", migration_check::migrate_host_local_connections);
}

#[test]
fn check_reports_loopback_connection_to_another_process() {
    run_in_group("check-lo", migration_check::refuse_loopback_session);
}

#[test]
fn file_locks_stay_held_during_migration() {
    run_in_group("locks", locks::locks_stay_held);
}

#[test]
fn waiting_reader_blocks_migration() {
    run_in_group("locks-not", locks::refuse_with_waiting_reader);
}

#[test]
fn file_locks_survive_daemon_crash() {
    run_in_group("locks-died", locks::locks_survive_crashes);
}

#[test]
fn acceptor_refuses_unlisted_user() {
    run_in_group("policy", acceptor_policy::refuse_unlisted_user);
}

#[test]
fn acceptor_refuses_files_that_user_cannot_open() {
    run_exclusively(acceptor_policy::admit_only_listed_files);
}

#[test]
fn acceptor_refuses_privileged_state() {
    run_exclusively(acceptor_policy::refuse_privileged_state);
}

#[test]
fn acceptor_refuses_messages_of_compromised_donor() {
    run_exclusively(compromised_donor::refuse_all_attacks);
}

#[test]
fn acceptor_refuses_unlisted_socket_family() {
    run_exclusively(acceptor_policy::refuse_unlisted_family);
}

#[test]
fn acceptor_obstacles_are_reported() {
    run_exclusively(|| obstacles::refuse_each_obstacle("obstacles"));
}

#[test]
fn daemon_has_documented_capabilities() {
    run_exclusively(daemon_capabilities::assert_capabilities_documented);
}

#[test]
fn reuseport_clients_keep_their_sockets() {
    run_exclusively(|| reuseport::clients_keep_relays("shared"));
}

#[test]
fn reuseport_program_selects_sockets_after_migration() {
    run_exclusively(|| reuseport::program_selects_after_move("chosen"));
}

#[test]
fn datagrams_are_answered_during_migration() {
    run_exclusively(|| client_traffic::datagrams_survive("udp"));
}

#[test]
fn connections_survive_migration() {
    run_exclusively(|| client_traffic::connections_survive("tcp"));
}

#[test]
fn connection_opened_before_freeze_migrates() {
    run_exclusively(|| client_traffic::connection_before_freeze("late"));
}

#[test]
fn connections_closed_before_freeze_end_cleanly() {
    run_exclusively(|| connections_during_move::connections_close_before_freeze("ends"));
}

#[test]
fn connections_opened_at_acceptor_survive_rollback() {
    run_exclusively(|| connections_during_move::connections_open_before_rollback("stays"));
}

#[test]
fn unaccepted_connections_migrate() {
    run_exclusively(|| {
        unaccepted_connections::unaccepted_connections_move("waiting", IpFamily::V4)
    });
    run_exclusively(|| {
        unaccepted_connections::unaccepted_connections_move("waiting6", IpFamily::V6)
    });
}

#[test]
fn connections_without_place_in_queue_follow_server() {
    run_exclusively(|| unaccepted_connections::connections_without_place_follow_server("full"));
}

#[test]
fn unaccepted_connections_survive_daemon_crash() {
    run_exclusively(|| unaccepted_connections::unaccepted_connections_survive_crash("survive"));
}

#[test]
fn unaccepted_connections_survive_donor_daemon_crash() {
    run_exclusively(|| {
        unaccepted_connections::unaccepted_connections_survive_donor_crash("survive-donor", false)?;
        unaccepted_connections::unaccepted_connections_survive_donor_crash("survive-pages", true)
    });
}

#[test]
fn clients_survive_daemon_crash() {
    run_exclusively(|| server_faults::fail_at_each_step("served", &server_faults::KILLS));
}

#[test]
fn clients_survive_daemon_crash_during_freeze() {
    run_exclusively(|| server_faults::kill_during_freeze("served-any"));
}

#[test]
fn clients_survive_loss_of_contact_host() {
    run_exclusively(|| contact_loss::lose_contact_at_each_step("contact"));
}

#[test]
fn clients_survive_loss_of_contact_host_at_its_decision() {
    run_exclusively(|| contact_loss::lose_contact_at_its_decisions("decision"));
}

#[test]
fn clients_survive_link_cut() {
    run_exclusively(|| server_faults::fail_at_each_step("served-cut", &server_faults::CUTS));
}

#[test]
#[ignore = "a thousand connections, 18 moves: ./x test-real runs this"]
fn thousand_connections_migrate_in_each_socket_mode() {
    run_exclusively(|| client_traffic::measure_freezes("measure"));
}

#[test]
fn server_under_verified_load_migrates_there_and_back() {
    run_exclusively(verified_load::migrate_without_database);
}

#[test]
fn memory_is_compressed_over_slow_link() {
    run_exclusively(|| {
        let world = MigrationGroup::up_over("packed", lab_topology(Some(SLOW_MBIT)))?;
        let counter = world.start("n2")?;
        world.wait("the program has written too few counts", || {
            Ok(counter.counts()?.len() > 400)
        })?;
        // A node that is not scheduled while it compresses estimates its link as faster than compression, for a while.
        let mut compressed = [false; 2];
        for turn in 0..2 * 4 {
            let (from, to) = [("n2", "n3"), ("n3", "n2")][turn % 2];
            let status = world.migrate_counter(&counter, from, to)?;
            let (sent, saved) = (status.copied_bytes, status.saved_bytes);
            eprintln!("{sent} bytes sent before, {saved} saved");
            compressed[turn % 2] |= saved > 1 << 20;
            if compressed == [true; 2] {
                break;
            }
        }
        ensure!(compressed == [true; 2], "not compressed");
        world.end(&counter)
    });
}

#[test]
fn database_session_survives_client_migration() {
    run_in_group("session", database_session::migrate_client_around_group);
}

#[test]
fn database_session_survives_daemon_crash() {
    run_in_group("s-killed", |world| {
        let points = [
            ("donor", "move-freeze before"),
            ("acceptor", "move-go before"),
            ("acceptor", "move-go after"),
            ("donor", "move-release before"),
            ("holder", "arbitrate after"),
        ];
        database_session::survive_daemon_crash(world, &points)
    });
}

#[test]
fn both_session_ends_migrate_in_turn() {
    run_in_group("s-both", database_session::migrate_both_ends);
}

#[test]
#[ignore = "needs mariadb-server-core: ./x test-real installs it and runs this"]
fn mariadb_session_survives_migration() {
    run_exclusively(verified_load::migrate_with_database);
}

#[test]
fn postcopy_migrates_loaded_server() {
    run_exclusively(postcopy::migrate_loaded_server);
}

#[test]
fn postcopy_migrates_there_and_back() {
    run_in_group("hot", postcopy::postcopy_there_and_back);
}

#[test]
fn unsupported_postcopy_is_refused() {
    run_in_group("hot-not", postcopy::refuse_unsupported);
}

#[test]
fn process_survives_daemon_crash_before_postcopy() {
    run_in_group("hot-early", |world| {
        let running_only = [postcopy::EndState::Running];
        // The number of steps is odd, so a sample has steps 1, 3, ... with one node, and the others with the other
        // node.
        let kills = [DONOR, ACCEPTOR].map(|node| STEPS.map(|at| (at, Fault::Kill(node))));
        for (at, fault) in sample(kills.as_flattened()) {
            postcopy::postcopy_with_fault(world, at, fault, &running_only)?;
        }
        Ok(())
    });
}

#[test]
fn process_has_allowed_end_state_after_postcopy_crash() {
    run_in_group("hot-late", postcopy::faults_during_postcopy);
}

#[test]
fn process_ends_when_postcopy_pages_are_lost() {
    run_in_group("hot-lost", |world| {
        postcopy::process_ends_when_restorer_dies(world)?;
        postcopy::process_ends_when_donor_is_lost(world)
    });
}

fn run_exclusively(case: impl FnOnce() -> Result<()>) {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("skipped: a lab needs root");
        return;
    }
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    if let Err(error) = case() {
        panic!("{error:#}");
    }
}

#[test]
#[ignore = "needs OpenArena's server: ./x test-real fetches it and runs this"]
fn openarena_migrates_ten_times_with_24_players() {
    run_exclusively(arena::migrate_openarena_ten_times);
}
