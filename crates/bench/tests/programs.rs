//! Real programs under their own load; each stays where it is. Needs their packages, so `./x test-real` runs these.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use holdfast_bench::programs::{CLIENTS, PROGRAMS, Program, Scene, run, stay};

const MOVES: u32 = 3;

fn program(name: &str) -> &'static Program {
    PROGRAMS
        .iter()
        .find(|program| program.name == name)
        .unwrap()
}

/// The load sees no error; and it sees it when one of its connections is taken from it, however it hides that.
#[track_caller]
fn is_loaded_and_watched(name: &str) {
    let program = program(name);
    let mut moves = 0;
    let outcome = run(program, MOVES, &mut |scene| {
        scene.root_process("n1")?;
        moves += 1;
        stay(scene)
    });
    let outcome = outcome.unwrap();
    eprintln!("{name}: {outcome:?}");
    assert_eq!((outcome.moves, moves), (MOVES, MOVES));
    let broken = run(program, MOVES, &mut break_one_connection);
    let error = broken.expect_err("a broken connection must be seen");
    eprintln!("{name}, one connection broken: {}", error.root_cause());
}

/// The client's kernel ends one connection, which the client has not asked for.
fn break_one_connection(scene: &Scene) -> Result<()> {
    let sockets = |kill: bool, more: &[String]| -> Result<String> {
        let mut command: Command = scene.lab().lab().command(CLIENTS)?;
        command.args(["ss", "-Htn"]).args(kill.then_some("-K"));
        let output = command.args(more).output().context("run ss")?;
        ensure!(output.status.success(), "ss: {output:?}");
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let of_load = ["state", "established", "dst", &scene.address().to_string()];
    let found = sockets(false, &of_load.map(str::to_owned))?;
    let mut words = found.split_ascii_whitespace();
    let client = words.nth(2).context("no connection")?;
    sockets(true, &["src".into(), client.to_owned()])?;
    Ok(())
}

macro_rules! programs {
    ($($name:ident)*) => {$(
        #[test]
        #[ignore = "needs the packages of the group `program` in scripts/setup.sh, some 600 MB; run by hand while nothing moves yet"]
        fn $name() {
            is_loaded_and_watched(stringify!($name));
        }
    )*};
}

programs!(redis nginx mosquitto memcached asyncio websocket jvm go);

#[test]
fn every_program_is_tried() {
    assert_eq!(PROGRAMS.len(), 8);
}
