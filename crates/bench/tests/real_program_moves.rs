//! Migrations of real programs under their own load. Needs the programs' packages, so `./x test-real` runs these tests.
#![cfg(target_arch = "x86_64")]

use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use holdfast_bench::churn::{self, ChurnPlan, measure};
use holdfast_testbed::programs::{
    BROKEN_CONNECTION, CLIENT_HOST, PROGRAMS, RunningProgram, UnmodifiedProgram, find_program_spec,
};

const MOVES: usize = 20;

/// Serializes the tests: two groups at once would slow each other down.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Asserts that the load sees no error while its server moves. As a control, the load must report an error when one of
/// its connections is broken, however well it hides reconnects.
#[track_caller]
fn assert_moves_under_load(name: &str) {
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let result = find_program_spec(name).and_then(move_program);
    if let Err(error) = result {
        panic!("{error:#}");
    }
}

fn move_program(program: &'static UnmodifiedProgram) -> Result<()> {
    let began = Instant::now();
    let mut scene = RunningProgram::up(program)?;
    let mut freezes_us = Vec::new();
    let outcome = scene.run_under_load(|scene| {
        for number in 1..=MOVES {
            let status = scene
                .move_to_next_node()
                .with_context(|| format!("move {number}"))?;
            freezes_us.push(status.freeze_us.unwrap_or_default());
            scene
                .check_progress()
                .with_context(|| format!("after move {number}"))?;
        }
        Ok(())
    })?;
    freezes_us.sort_by(f64::total_cmp);
    eprintln!(
        "{}: {MOVES} moves in {:.1} s, freeze {:.1} ms median, {:.1} ms longest; {} segments, {}",
        program.name,
        began.elapsed().as_secs_f64(),
        freezes_us[MOVES / 2] / 1e3,
        freezes_us[MOVES - 1] / 1e3,
        outcome.segments,
        outcome.load_result
    );
    // New clients reach the server on the node where it runs after the moves.
    scene.direct_new_clients()?;
    let Err(load_error) = scene.run_under_load(|scene| break_one_connection(scene)) else {
        bail!("the load did not detect a broken connection");
    };
    let error_text = format!("{load_error:#}");
    ensure!(
        error_text.contains(BROKEN_CONNECTION),
        "the load reported another error: {error_text}"
    );
    Ok(())
}

/// Has the client's kernel end one connection, without a request from the client.
fn break_one_connection(scene: &RunningProgram) -> Result<()> {
    let run_ss = |kill: bool, arguments: &[String]| -> Result<String> {
        let mut command: Command = scene.cluster().lab().command(CLIENT_HOST)?;
        command.args(["ss", "-Htn"]).args(kill.then_some("-K"));
        let output = command.args(arguments).output().context("run ss")?;
        ensure!(output.status.success(), "ss: {output:?}");
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let load_filter = ["state", "established", "dst", &scene.address().to_string()];
    let socket_list = run_ss(false, &load_filter.map(str::to_owned))?;
    let mut words = socket_list.split_ascii_whitespace();
    let client = words.nth(2).context("no connection")?;
    run_ss(true, &["src".into(), client.to_owned()])?;
    Ok(())
}

macro_rules! programs {
    ($($name:ident)*) => {$(
        #[test]
        #[ignore = "needs the packages of the group `program` in scripts/setup.sh, some 600 MB: ./x test-real"]
        fn $name() {
            assert_moves_under_load(stringify!($name));
        }
    )*};
}

/// Moves servers while their clients connect and disconnect.
#[test]
#[ignore = "needs the packages of the group `program` in scripts/setup.sh, some 600 MB: ./x test-real"]
fn servers_migrate_during_connection_churn() {
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    // PostgreSQL and php-fpm have no measurement at rest yet.
    let measured = ["nginx", "nginx-4", "haproxy", "jvm", "go"];
    for program in churn::PROGRAMS
        .iter()
        .filter(|program| measured.contains(&program.name))
    {
        let plan = ChurnPlan {
            program,
            long_connections: 32,
            new_per_s: 20,
            moves: 6,
            duration_after_last_move: Duration::from_secs(3),
        };
        let row = measure(plan).unwrap_or_else(|error| panic!("{}: {error:#}", program.name));
        eprintln!("{row}");
        assert_eq!((row.errors, row.bytes_wrong), (0, 0), "{row}");
        assert_eq!(row.held_elsewhere, 0, "{row}");
        assert!(row.moved + 1 >= row.moves, "{row}");
    }
}

programs!(redis nginx mosquitto memcached asyncio websocket jvm go);

#[test]
fn every_program_has_test() {
    assert_eq!(PROGRAMS.len(), 8);
}
