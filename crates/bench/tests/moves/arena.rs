//! OpenArena's dedicated server moves while 24 players play: paper 002, section VI-B.

use std::net::SocketAddr;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use holdfast_api::Protocol;
use holdfast_api::control::MigrationOutcome;
use holdfast_bench::arena::{Game, Phase, Players, Settings, now};
use holdfast_bench::cluster::{Cluster, ClusterSpec, Family, Service};

use crate::world::World;

const PLAYERS: u16 = 24;
const PORT: u16 = 27960;
/// Snapshots and user commands a second.
const SNAPSHOTS: u32 = 20;
const COMMANDS: u32 = 40;
/// How long players wait for the server, and it for them.
const SILENCE: Duration = Duration::from_secs(5);
const START: Duration = Duration::from_secs(60);
/// Between two moves.
const PLAY: Duration = Duration::from_secs(1);
const MOVES: usize = 10;

/// Nobody is disconnected, and no snapshot is lost.
pub fn ten_times() -> Result<()> {
    let game = Game::find()?;
    let world = up()?;
    let folder = tempfile::tempdir()?;
    let mut pid = start(&world, &game, folder.path())?;
    let players = join(&world)?;
    let begin = now();
    let (mut from, mut to) = ("n2", "n3");
    for _ in 0..MOVES {
        std::thread::sleep(PLAY);
        let id = world.begin(pid, from, to)?;
        let began = now();
        let status = world.ended(from, id)?;
        ensure!(
            status.outcome == MigrationOutcome::Moved,
            "from {from} to {to}: {:?}",
            status.outcome
        );
        std::thread::sleep(PLAY / 2);
        let interval = Duration::from_secs(1) / SNAPSHOTS;
        let window = began..=now();
        let delays = players.reports().into_iter();
        let delays = delays.filter_map(|of| of.trace.added_delay(window.clone(), interval));
        eprintln!(
            "{from} to {to}: freeze {:.1} ms, {:.1} MiB before, {:.2} MiB in it; longest added delay {:?}",
            status.freeze_us.unwrap_or(0.0) / 1e3,
            status.copied_bytes as f64 / f64::from(1 << 20),
            status.freeze_bytes as f64 / f64::from(1 << 20),
            delays.max()
        );
        let residents = world.residents(to)?;
        ensure!(residents.len() == 1, "{residents:?}");
        pid = residents[0].pid;
        (from, to) = (to, from);
    }
    std::thread::sleep(PLAY);
    let window = begin..=now();
    for (report, number) in players.leave()?.iter().zip(1..) {
        ensure!(
            report.phase == Phase::Playing,
            "player {number}: {:?}",
            report.phase
        );
        let trace = &report.trace;
        let lost = (trace.lost_in, trace.late_in, trace.malformed);
        ensure!(
            lost == (0, 0, 0),
            "player {number}: lost, late, malformed {lost:?}"
        );
        ensure!(
            trace.median_gap(window.clone()).is_some(),
            "player {number} saw nothing"
        );
    }
    Ok(())
}

fn up() -> Result<World> {
    let mut spec = ClusterSpec::new(format!("m-arena-{}", std::process::id()));
    spec.migration = true;
    spec.clients = PLAYERS;
    let mut service = Service::new("arena", Protocol::Udp, PORT);
    service.weights = [("n1", 0), ("n2", 1), ("n3", 0)]
        .map(|(node, weight)| (node.to_owned(), weight))
        .into();
    spec.services = vec![service];
    Ok(World {
        cluster: Cluster::up(spec)?,
    })
}

/// The server at n2, at the service address; gives its PID there.
fn start(world: &World, game: &Game, home: &std::path::Path) -> Result<i32> {
    std::fs::create_dir_all(home.join("baseoa"))?;
    std::fs::write(home.join("baseoa/default.cfg"), "// nothing\n")?;
    let address = world.cluster.service_address(Family::V4).to_string();
    let mut words = game.words(home, PORT, usize::from(PLAYERS), SNAPSHOTS);
    words.extend(["+set", "net_ip", &address].map(str::to_owned));
    // Of what started it, it has the PID and no descriptors.
    let script = "exec 3>&- 4>&-; (echo $BASHPID >$0/pid; for fd in /proc/self/fd/*; do n=${fd##*/}; \
                  [ $n -gt 2 ] && eval \"exec $n>&-\"; done; exec setsid env \"$@\") \
                  </dev/null >$0/log 2>&1 &";
    let mut command = world.cluster.lab().command("n2")?;
    command.args(["bash", "-c", script]).arg(home).args(&words);
    let status = command.stdin(Stdio::null()).status()?;
    ensure!(status.success(), "the server was not started: {status}");
    let pid = || -> Result<i32> {
        let text = std::fs::read_to_string(home.join("pid"))?;
        text.trim().parse().context("no PID")
    };
    world.wait("the server does not start", || Ok(pid().is_ok()))?;
    pid()
}

fn join(world: &World) -> Result<Players> {
    let hosts: Vec<String> = (1..=PLAYERS).map(|number| format!("c{number}")).collect();
    let settings = |number| Settings {
        name: format!("player{number}"),
        number,
        interval: Duration::from_secs(1) / COMMANDS,
        snapshots: SNAPSHOTS,
        silence: SILENCE,
    };
    let server = SocketAddr::new(world.cluster.service_address(Family::V4), PORT);
    let players = Players::join(world.cluster.lab(), &hosts, server, settings)?;
    players.wait_until_all_play(START)?;
    Ok(players)
}
