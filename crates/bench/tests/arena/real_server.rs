//! Tests with the real server: they need root and OpenArena's packages, so `./x test-real` runs them.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use holdfast_testbed::openarena::{ArenaMatch, ClientPhase, GameFiles, unix_time};

/// Serializes the tests: two servers at once would disturb each other's timing.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

const PLAYERS: u16 = 24;
/// Snapshots per second: the default of the paper and of the server.
const SNAPSHOTS_PER_S: u32 = 20;
/// User commands per second.
const COMMANDS_PER_S: u32 = 40;
/// Silence of the server after which a player gives up.
const SILENCE_MAX: Duration = Duration::from_secs(3);
/// Duration of play.
const PLAY_DURATION: Duration = Duration::from_secs(5);

fn start_match(name: &str, player_count: u16) -> ArenaMatch {
    let game = GameFiles::find().unwrap();
    let name = format!("arena-{name}-{}", std::process::id());
    ArenaMatch::up(&name, &game, 2, player_count, SNAPSHOTS_PER_S).unwrap()
}

#[test]
#[ignore = "needs OpenArena's server: ./x test-real fetches it and runs this"]
fn twenty_four_players_lose_nothing() {
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let arena = start_match("play", PLAYERS);
    let players = arena.join(COMMANDS_PER_S, SILENCE_MAX).unwrap();
    let start = unix_time();
    std::thread::sleep(PLAY_DURATION);
    let window = start..=unix_time();
    // The status query repeats its datagram if the server does not answer at once.
    let query_status = || arena.status("c1").ok();
    let status = arena
        .lab()
        .wait_for("the server answers", PLAY_DURATION * 10, query_status)
        .unwrap();
    let reports = players.stop().unwrap();

    let mut longest = Duration::ZERO;
    for (report, number) in reports.iter().zip(1..) {
        assert_eq!(report.phase, ClientPhase::Playing, "player {number}");
        let trace = &report.trace;
        let lost = (trace.lost_messages, trace.late_datagrams, trace.malformed);
        assert_eq!(lost, (0, 0, 0), "player {number}");
        let median_gap = trace.median_gap(window.clone()).unwrap();
        let interval_error = median_gap.abs_diff(arena.snapshot_interval());
        assert!(
            interval_error < arena.snapshot_interval() / 4,
            "player {number}: {median_gap:?}"
        );
        // The game carries out the player's commands, and the player moves.
        let newest = trace.arrivals.last().unwrap().server_time_ms;
        let command_delay_ms = newest - trace.command_time_ms;
        assert!(
            command_delay_ms < 500,
            "player {number}: commands are {command_delay_ms} ms late"
        );
        assert!(trace.steps > 20, "player {number}: {} steps", trace.steps);
        // The player receives the others' chat, and its own chat reaches them.
        assert!(trace.commands_done > 0, "player {number}");
        assert!(
            trace.server_commands > u64::from(PLAYERS) / 2,
            "player {number}"
        );
        let name = format!("player{number}");
        assert!(
            status.players.iter().any(|player| player.name == name),
            "{name}"
        );
        longest = longest.max(
            trace
                .added_delay(window.clone(), arena.snapshot_interval())
                .unwrap(),
        );
    }
    assert_eq!(status.players.len(), usize::from(PLAYERS));
    assert_eq!(
        arena.missed_datagrams().unwrap(),
        0,
        "{}",
        arena.lab().log_tails()
    );
    eprintln!("longest delay of any player: {longest:?}");
}

#[test]
#[ignore = "needs OpenArena's server: ./x test-real fetches it and runs this"]
fn cut_off_player_disconnects_and_losses_are_counted() {
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let arena = start_match("cut", 2);
    let players = arena.join(COMMANDS_PER_S, SILENCE_MAX).unwrap();
    let lab = arena.lab();
    // A short cut: the player goes on, and both sides count the lost datagrams.
    lab.lab().cut("c2").unwrap();
    std::thread::sleep(Duration::from_secs(1));
    let start = unix_time();
    lab.lab().heal("c2").unwrap();
    lab.wait_for(
        "both sides count the lost datagrams",
        PLAY_DURATION * 10,
        || {
            let trace = &players.reports()[1].trace;
            (trace.lost_messages > 5 && arena.missed_datagrams().ok()? > 5).then_some(())
        },
    )
    .unwrap();
    let report = players.reports()[1].clone();
    assert_eq!(report.phase, ClientPhase::Playing);
    let delay = report
        .trace
        .added_delay(start..=unix_time(), arena.snapshot_interval());
    assert!(delay.unwrap() > Duration::from_millis(500), "{delay:?}");
    // A permanent cut.
    lab.lab().cut("c2").unwrap();
    lab.wait_for("the player is disconnected", PLAY_DURATION * 10, || {
        matches!(players.reports()[1].phase, ClientPhase::Disconnected(_)).then_some(())
    })
    .unwrap();
    assert_eq!(players.reports()[0].phase, ClientPhase::Playing);
    assert_eq!(players.reports()[0].trace.lost_messages, 0);
}
