//! Migrations of processes between the nodes of a group by their daemons, there and back. Needs root.
#![cfg(target_arch = "x86_64")]

mod arena;
mod check;
mod churn;
mod clients;
#[path = "../common/mod.rs"]
mod common;
mod copies;
mod counted;
mod false_donor;
mod faults;
mod followed;
mod loaded;
mod locks;
mod moments;
#[path = "../udp/numbered.rs"]
#[allow(dead_code, reason = "a part is used")]
mod numbered;
mod obstacles;
mod policy;
mod privileges;
mod served;
mod session;
mod shared_port;
mod units;
mod waiting;
mod world;

use std::sync::{Mutex, PoisonError};

use anyhow::{Result, ensure};
use holdfast_bench::cluster::Family;
use holdfast_bench::migrate::topology;

use faults::{ACCEPTOR, DONOR, Fault, HOLDER, Point, STEPS, point, sample};
use world::World;

/// Rate of a link that is slower than any processor compresses, in Mbit/s.
const SLOW_MBIT: u32 = 50;

/// Serializes the tests: two groups at once would slow each other down.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Brings a group up and runs a case in it.
fn in_world(name: &str, case: impl FnOnce(&World) -> Result<()>) {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("skipped: a lab needs root");
        return;
    }
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let world = World::up(name).unwrap_or_else(|error| panic!("{error:#}"));
    if let Err(error) = case(&world) {
        panic!("{error:#}");
    }
}

#[test]
fn a_process_moves_there_and_back() {
    in_world("back", counted::there_and_back);
}

#[test]
fn clients_that_come_and_go_do_not_hinder_moves() {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("skipped: a lab needs root");
        return;
    }
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    if let Err(error) = churn::moves() {
        panic!("{error:#}");
    }
}

#[test]
fn a_freeze_is_while_nobody_runs() {
    in_world("freeze", counted::freezes);
}

/// Runs the points that contain `HOLDFAST_FAULT` in their command, or all points without this variable.
fn at(world: &World, points: &[Point], fault: Fault) -> Result<()> {
    let part = std::env::var("HOLDFAST_FAULT").unwrap_or_default();
    let wanted = points.iter().filter(|at| at.command.contains(&part));
    wanted
        .copied()
        .try_for_each(|at| faults::run(world, at, fault))
}

#[test]
fn the_donors_daemon_dies() {
    in_world("donor", |world| {
        at(world, &STEPS, Fault::Kill(DONOR))?;
        let own = [
            "move-check after",
            "move-release before",
            "move-release after",
        ];
        at(
            world,
            &own.map(|command| point(DONOR, command)),
            Fault::Kill(DONOR),
        )
    });
}

#[test]
fn the_acceptors_daemon_dies() {
    in_world("acceptor", |world| {
        at(world, &STEPS, Fault::Kill(ACCEPTOR))?;
        let own = ["move-build before", "move-go after"];
        at(
            world,
            &own.map(|command| point(ACCEPTOR, command)),
            Fault::Kill(ACCEPTOR),
        )
    });
}

#[test]
fn the_link_between_them_breaks() {
    in_world("cut", |world| {
        // Before the freeze nothing has changed that a cut could make inconsistent: one point stands for all.
        let stopped = [&STEPS[..1], &STEPS[3..]].concat();
        at(world, &stopped, Fault::Cut(DONOR, ACCEPTOR))?;
        let alone = [point(DONOR, "move-freeze after")];
        at(world, &alone, Fault::Cut(DONOR, HOLDER))?;
        let alone = [point(ACCEPTOR, "move-restore after")];
        at(world, &alone, Fault::Cut(ACCEPTOR, HOLDER))
    });
}

#[test]
fn the_holders_daemon_dies_or_both_do() {
    in_world("holder", |world| {
        let own = ["arbitrate before", "arbitrate after"];
        at(
            world,
            &own.map(|command| point(HOLDER, command)),
            Fault::Kill(HOLDER),
        )?;
        at(world, &STEPS[2..], Fault::KillBoth)
    });
}

#[test]
fn the_process_is_killed() {
    in_world("killed", |world| {
        let mut points = STEPS.iter();
        points.try_for_each(|at| faults::kill_the_process(world, *at))
    });
}

#[test]
fn a_copy_runs_beside_its_original() {
    in_world("copy", copies::beside);
}

#[test]
fn the_donors_daemon_dies_while_it_copies() {
    in_world("copy-donor", |world| {
        let kill = Fault::Kill(DONOR);
        let mut points = STEPS.iter();
        points.try_for_each(|at| copies::disturbed(world, *at, kill))?;
        copies::disturbed(world, point(DONOR, "move-thaw before"), kill)
    });
}

#[test]
fn the_acceptors_daemon_dies_while_it_copies() {
    in_world("copy-acceptor", |world| {
        let kill = Fault::Kill(ACCEPTOR);
        let mut points = STEPS.iter();
        points.try_for_each(|at| copies::disturbed(world, *at, kill))?;
        copies::disturbed(world, point(ACCEPTOR, "move-go after"), kill)
    });
}

#[test]
fn clients_stay_with_the_original_while_it_is_copied() {
    alone(|| copies::clients("copied"));
}

#[test]
fn the_control_group_of_a_unit_follows() {
    in_world("unit", units::follow);
}

#[test]
fn the_control_group_of_a_unit_that_does_not_come_is_left_alone() {
    in_world("unit-stays", units::stay);
}

#[test]
fn what_moves_is_said_before() {
    in_world("check", check::movable);
}

#[test]
fn what_does_not_move_is_named_before() {
    in_world("check-not", check::blocked);
}

#[test]
fn connections_that_stay_within_their_host_move_at_any_stage() {
    in_world("near", check::near);
}

#[test]
fn a_connection_that_cannot_leave_the_host_is_named_before() {
    in_world("check-lo", check::over_loopback);
}

#[test]
fn locks_are_never_free_while_their_process_moves() {
    in_world("locks", locks::never_free);
}

#[test]
fn a_lock_that_a_reader_waits_for_keeps_its_process() {
    in_world("locks-not", locks::refused);
}

#[test]
fn a_daemon_dies_while_locks_are_handed_over() {
    in_world("locks-died", locks::disturbed);
}

#[test]
fn a_user_that_is_not_listed_stays() {
    in_world("policy", policy::a_user);
}

#[test]
fn what_a_process_has_open_its_users_could_open() {
    alone(policy::files);
}

#[test]
fn state_that_only_root_may_set_stays() {
    alone(policy::state);
}

#[test]
fn a_donor_that_was_taken_over_gets_nothing_of_roots() {
    alone(false_donor::refused);
}

#[test]
fn a_family_of_sockets_that_is_not_listed_stays() {
    alone(policy::family);
}

#[test]
fn what_stands_in_the_way_at_the_acceptor_is_named() {
    alone(|| obstacles::refused("obstacles"));
}

#[test]
fn the_daemon_has_the_capabilities_that_are_documented() {
    alone(privileges::as_documented);
}

#[test]
fn clients_of_sockets_that_share_a_port_keep_their_sockets() {
    alone(|| shared_port::clients_keep_their_sockets("shared"));
}

#[test]
fn sockets_that_share_a_port_are_chosen_by_their_program() {
    alone(|| shared_port::groups_choose_as_before("chosen"));
}

#[test]
fn datagrams_of_clients_are_answered_while_their_server_moves() {
    alone(|| clients::datagrams("udp"));
}

#[test]
fn connections_of_clients_go_on_while_their_server_moves() {
    alone(|| clients::connections("tcp"));
}

#[test]
fn a_connection_that_begins_in_the_last_moment_goes_along() {
    alone(|| clients::late("late"));
}

#[test]
fn connections_that_their_server_closes_in_the_last_moment_end_as_they_should() {
    alone(|| moments::ends("ends"));
}

#[test]
fn connections_that_begin_at_the_acceptor_are_not_reset_where_the_server_stays() {
    alone(|| moments::begin_before_it_stays("stays"));
}

#[test]
fn connections_that_nobody_has_accepted_follow() {
    alone(|| waiting::follow("waiting", Family::V4));
    alone(|| waiting::follow("waiting6", Family::V6));
}

#[test]
fn connections_that_nobody_has_accepted_survive_a_daemon() {
    alone(|| waiting::survive("survive"));
}

#[test]
fn clients_go_on_when_a_daemon_dies() {
    alone(|| served::disturbed("served", &served::KILLS));
}

#[test]
fn clients_go_on_when_a_daemon_dies_at_any_moment_of_a_freeze() {
    alone(|| served::at_any_moment("served-any"));
}

#[test]
fn clients_go_on_when_a_link_breaks() {
    alone(|| served::disturbed("served-cut", &served::CUTS));
}

#[test]
#[ignore = "a thousand connections, 18 moves: ./x test-real runs this"]
fn a_thousand_connections_move_in_each_way() {
    alone(|| clients::measure("measure"));
}

#[test]
fn a_server_under_a_verified_load_moves_there_and_back() {
    alone(loaded::there_and_back);
}

#[test]
fn memory_is_compressed_on_its_way_over_a_slow_link() {
    alone(|| {
        let world = World::up_over("packed", topology(Some(SLOW_MBIT)))?;
        let counter = world.start("n2")?;
        world.wait("its memory is small", || Ok(counter.counts()?.len() > 400))?;
        // A node that is not scheduled while it compresses estimates its link as faster than compression, for a while.
        let mut compressed = [false; 2];
        for turn in 0..2 * 4 {
            let (from, to) = [("n2", "n3"), ("n3", "n2")][turn % 2];
            let status = world.migrate(&counter, from, to)?;
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
fn a_session_to_a_database_goes_on_while_its_client_moves() {
    in_world("session", session::goes_round);
}

#[test]
fn a_session_goes_on_when_a_daemon_dies() {
    in_world("s-killed", |world| {
        let points = [
            ("donor", "move-freeze before"),
            ("acceptor", "move-go before"),
            ("acceptor", "move-go after"),
            ("donor", "move-release before"),
            ("holder", "arbitrate after"),
        ];
        session::survives(world, &points)
    });
}

#[test]
fn both_ends_of_a_session_move_one_after_the_other() {
    in_world("s-both", session::both_ends);
}

#[test]
#[ignore = "needs mariadb-server-core: ./x test-real installs it and runs this"]
fn a_session_to_mariadb_goes_on_while_the_server_moves() {
    alone(loaded::with_a_database);
}

#[test]
fn memory_follows_a_server_that_has_moved() {
    alone(followed::a_server);
}

#[test]
fn memory_follows_there_and_back() {
    in_world("hot", followed::there_and_back);
}

#[test]
fn what_memory_cannot_follow_is_refused() {
    in_world("hot-not", followed::refused);
}

#[test]
fn daemons_die_before_memory_follows() {
    in_world("hot-early", |world| {
        let goes = [followed::End::Goes];
        // The number of steps is odd, so a sample has steps 1, 3, ... with one node, and the others with the other
        // node.
        let kills = [DONOR, ACCEPTOR].map(|node| STEPS.map(|at| (at, Fault::Kill(node))));
        for (at, fault) in sample(kills.as_flattened()) {
            followed::disturbed(world, at, fault, &goes)?;
        }
        Ok(())
    });
}

#[test]
fn daemons_die_while_memory_follows() {
    in_world("hot-late", followed::while_it_follows);
}

#[test]
fn who_takes_memory_that_follows_dies_or_gets_no_more() {
    in_world("hot-lost", |world| {
        followed::the_restorer_dies(world)?;
        followed::the_donor_is_lost(world)
    });
}

fn alone(case: impl FnOnce() -> Result<()>) {
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
fn openarena_moves_ten_times_while_24_play() {
    alone(arena::ten_times);
}
