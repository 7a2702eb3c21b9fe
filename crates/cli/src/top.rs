//! `holdfast top`: the group, its loads and its moves, live.

mod actions;
mod screen;
mod snapshot;

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Args;
use holdfast_api::control::BlockingControlClient;
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyEventKind};

use crate::daemon_client::DaemonArgs;
use crate::output::{output, print_json};
use actions::Keyboard;
use snapshot::Snapshot;

/// Width of the text that `--once` prints, in columns.
const ONCE_COLUMNS: u16 = 160;

/// Show the nodes of the group, their loads, this node's processes and moves, live
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  holdfast top
  holdfast top --once
  holdfast top --once --json | jq '.balance.nodes[] | {name, load_percent}'

Keys: up and down choose a process, m moves it to a node, d drains this node, u ends the drain, b switches balancing at this
node on or off, p tells what this node would move now, q ends. Draining and moving ask first.

The screen shows what this node knows: loads of other nodes are up to some seconds old, processes and moves are this node's.")]
pub struct TopArgs {
    #[command(flatten)]
    daemon: DaemonArgs,
    /// Seconds between two looks at the daemon
    #[arg(long, value_name = "S", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=3_600))]
    interval: u16,
    /// Print the screen once as text, without colors
    #[arg(long)]
    once: bool,
    /// Print JSON: {"status": …, "nodes": …, "balance": …, "load": …, "drain": …, "migrations": …, "handoffs": …}
    #[arg(long, requires = "once")]
    json: bool,
}

/// Runs `holdfast top`.
///
/// # Errors
/// The daemon does not answer at first, or standard output is no terminal.
pub fn run(args: &TopArgs) -> Result<()> {
    let client = args.daemon.client()?;
    let first = Snapshot::read(&args.daemon, &client)?;
    if args.json {
        return print_json(&first);
    }
    if args.once {
        output!("{}", screen::text(&first, ONCE_COLUMNS));
        return Ok(());
    }
    ensure!(
        std::io::stdout().is_terminal() && std::io::stdin().is_terminal(),
        "no terminal to draw on; `holdfast top --once` prints the screen as text"
    );
    let mut terminal = ratatui::try_init().context("prepare the terminal")?;
    let interval = Duration::from_secs(u64::from(args.interval));
    let ended = watch(&mut terminal, &args.daemon, &client, first, interval);
    ratatui::restore();
    ended
}

/// Shows the group until the user ends the program.
fn watch(
    terminal: &mut DefaultTerminal,
    daemon: &DaemonArgs,
    client: &BlockingControlClient,
    first: Snapshot,
    interval: Duration,
) -> Result<()> {
    let mut snapshot = first;
    let mut keyboard = Keyboard::default();
    let mut next_look = Instant::now() + interval;
    while !keyboard.has_ended() {
        keyboard.follow(&snapshot);
        terminal
            .draw(|frame| screen::draw(frame, &snapshot, &keyboard))
            .context("draw the screen")?;
        let wait = next_look.saturating_duration_since(Instant::now());
        if event::poll(wait).context("wait for a key")?
            && let Event::Key(key) = event::read().context("read a key")?
            && key.kind == KeyEventKind::Press
            && let Some(request) = keyboard.press(key, &snapshot)
        {
            keyboard.note_answer(request.send(daemon, client));
            // The effect is to be seen at once.
            next_look = Instant::now();
        }
        if Instant::now() >= next_look {
            next_look = Instant::now() + interval;
            match Snapshot::read(daemon, client) {
                Ok(newer) => {
                    keyboard.note_contact(None);
                    snapshot = newer;
                }
                // The screen stays, and says that it is old.
                Err(error) => keyboard.note_contact(Some(format!("{error:#}"))),
            }
        }
    }
    Ok(())
}
