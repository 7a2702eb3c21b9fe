//! Tests with the real server: they need root and OpenArena's packages, so `./x test-real` runs them.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use holdfast_bench::arena::{Game, Match, Phase, now};

/// Serializes the tests: two servers at once would disturb each other's timing.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

const PLAYERS: u16 = 24;
/// Snapshots per second: the default of the paper and of the server.
const SNAPSHOTS: u32 = 20;
/// User commands per second.
const COMMANDS: u32 = 40;
/// Silence of the server after which a player gives up.
const SILENCE: Duration = Duration::from_secs(3);
/// Duration of play.
const PLAY: Duration = Duration::from_secs(5);

fn a_match(name: &str, seats: u16) -> Match {
    let game = Game::find().unwrap();
    let name = format!("arena-{name}-{}", std::process::id());
    Match::up(&name, &game, 2, seats, SNAPSHOTS).unwrap()
}

#[test]
#[ignore = "needs OpenArena's server: ./x test-real fetches it and runs this"]
fn twenty_four_players_play_and_nothing_is_lost() {
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let arena = a_match("play", PLAYERS);
    let players = arena.join(COMMANDS, SILENCE).unwrap();
    let begin = now();
    std::thread::sleep(PLAY);
    let window = begin..=now();
    // The status query repeats its datagram if the server does not answer at once.
    let ask = || arena.status("c1").ok();
    let status = arena
        .lab()
        .until("the server answers", PLAY * 10, ask)
        .unwrap();
    let reports = players.leave().unwrap();

    let mut longest = Duration::ZERO;
    for (report, number) in reports.iter().zip(1..) {
        assert_eq!(report.phase, Phase::Playing, "player {number}");
        let trace = &report.trace;
        let lost = (trace.lost_in, trace.late_in, trace.malformed);
        assert_eq!(lost, (0, 0, 0), "player {number}");
        let median = trace.median_gap(window.clone()).unwrap();
        let off = median.abs_diff(arena.interval());
        assert!(off < arena.interval() / 4, "player {number}: {median:?}");
        // The game carries out the player's commands, and the player moves.
        let newest = trace.arrivals.last().unwrap().server_time_ms;
        let behind = newest - trace.command_time_ms;
        assert!(behind < 500, "player {number}: {behind} ms behind");
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
        longest = longest.max(trace.added_delay(window.clone(), arena.interval()).unwrap());
    }
    assert_eq!(status.players.len(), usize::from(PLAYERS));
    assert_eq!(arena.missed().unwrap(), 0, "{}", arena.lab().logs());
    eprintln!("longest delay of any player: {longest:?}");
}

#[test]
#[ignore = "needs OpenArena's server: ./x test-real fetches it and runs this"]
fn a_player_that_is_cut_off_is_disconnected_and_what_it_missed_is_seen() {
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let arena = a_match("cut", 2);
    let players = arena.join(COMMANDS, SILENCE).unwrap();
    let lab = arena.lab();
    // A short cut: the player goes on, and both sides count the lost datagrams.
    lab.lab().cut("c2").unwrap();
    std::thread::sleep(Duration::from_secs(1));
    let begin = now();
    lab.lab().heal("c2").unwrap();
    lab.until("both sides count what was lost", PLAY * 10, || {
        let trace = &players.reports()[1].trace;
        (trace.lost_in > 5 && arena.missed().ok()? > 5).then_some(())
    })
    .unwrap();
    let report = players.reports()[1].clone();
    assert_eq!(report.phase, Phase::Playing);
    let delay = report.trace.added_delay(begin..=now(), arena.interval());
    assert!(delay.unwrap() > Duration::from_millis(500), "{delay:?}");
    // A permanent cut.
    lab.lab().cut("c2").unwrap();
    lab.until("the player is gone", PLAY * 10, || {
        matches!(players.reports()[1].phase, Phase::Disconnected(_)).then_some(())
    })
    .unwrap();
    assert_eq!(players.reports()[0].phase, Phase::Playing);
    assert_eq!(players.reports()[0].trace.lost_in, 0);
}
