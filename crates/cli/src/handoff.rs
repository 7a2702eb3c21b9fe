//! `holdfast handoff`: moves connections to another node.

use std::io::{IsTerminal, Write, stderr};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use clap::Args;
use holdfast_api::control::{
    FlowFilter, FlowOutcome, FlowResult, FlowSelection, HandoffRequest, HandoffState, HandoffStatus,
};
use holdfast_api::{Drain, FlowText};

use crate::ExitResult;
use crate::daemon_client::DaemonArgs;
use crate::flow::parse_flow;
use crate::output::{output, output_line, print_json};
use crate::table::{TextTable, optional_micros};

/// Interval between polls of a running handoff.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Move connections of this node to another node
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  holdfast handoff tcp:10.0.0.1:80-10.0.1.2:4242 --to n2
  holdfast handoff --all --pool files --limit 100 --to n3 --drain 50

Run the command on the node that owns the flows; `holdfast flow list` shows the owner.")]
pub struct HandoffArgs {
    #[command(flatten)]
    daemon: DaemonArgs,
    /// tcp:LOCAL:PORT-REMOTE:PORT, with the service address as LOCAL; repeatable
    #[arg(value_parser = parse_flow, required_unless_present = "all", conflicts_with = "all")]
    flow: Vec<FlowText>,
    /// The node that takes the flows
    #[arg(long, value_name = "NODE")]
    to: String,
    /// First wait for each send queue to empty, at most this many milliseconds
    #[arg(long, value_name = "MS")]
    drain: Option<u32>,
    /// Hand off all flows that this node owns
    #[arg(long)]
    all: bool,
    /// With --all: only flows of this pool
    #[arg(long, conflicts_with = "flow")]
    pool: Option<String>,
    /// With --all: maximum number of flows
    #[arg(long, value_name = "N", conflicts_with = "flow")]
    limit: Option<u64>,
    /// Maximum time to wait for the result, in seconds
    #[arg(
        long, value_name = "SECONDS", default_value_t = 60, default_missing_value = "60", num_args = 0..=1,
        require_equals = true
    )]
    wait: u64,
    /// Return after the handoff has started
    #[arg(long, conflicts_with = "wait")]
    no_wait: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs `holdfast handoff`.
///
/// # Errors
/// The daemon refuses, or there is no result within the time limit.
pub fn run(args: &HandoffArgs) -> Result<ExitResult> {
    let client = args.daemon.client()?;
    let request = handoff_request(args);
    let accepted = args
        .daemon
        .ask(&client, |client| client.hand_off(&request))?;
    if args.no_wait {
        if args.json {
            print_json(&accepted)?;
        } else if accepted.flows == 0 {
            output_line!("{NOTHING_TO_DO}");
        } else {
            output_line!(
                "handoff {} of {} flows to {} has begun",
                accepted.id,
                accepted.flows,
                args.to
            );
        }
        return Ok(ExitResult::Success);
    }
    let deadline = Instant::now() + Duration::from_secs(args.wait);
    let mut progress = ProgressLine::new();
    let status = loop {
        let status = args
            .daemon
            .ask(&client, |client| client.handoff(accepted.id))?;
        progress.show(&status);
        if status.summary.state == HandoffState::Finished {
            break status;
        }
        if Instant::now() > deadline {
            let done = status.summary.moved + status.summary.kept;
            let (total, id) = (status.summary.total, accepted.id);
            bail!(
                "after {} s, {done} of {total} flows of handoff {id} have a result; the handoff continues. \
                 `holdfast flow list` shows the owners, --wait=SECONDS waits longer",
                args.wait
            );
        }
        sleep(POLL_INTERVAL);
    };
    progress.end();
    if args.json {
        print_json(&status)?;
    } else {
        output!("{}", handoff_text(&status));
    }
    Ok(exit_result(&status))
}

fn handoff_request(args: &HandoffArgs) -> HandoffRequest {
    let selection = if args.all {
        FlowSelection::AllOf(FlowFilter {
            pool: args.pool.clone(),
            limit: args.limit,
            ..FlowFilter::default()
        })
    } else {
        FlowSelection::Flows(args.flow.clone())
    };
    let drain = args
        .drain
        .map_or(Drain::None, |max_wait_ms| Drain::First { max_wait_ms });
    HandoffRequest {
        selection,
        to: args.to.clone(),
        drain,
    }
}

/// Returns the exit status: failure only if all flows were kept.
fn exit_result(status: &HandoffStatus) -> ExitResult {
    match (status.summary.moved, status.summary.kept) {
        (_, 0) => ExitResult::Success,
        (0, _) => ExitResult::Failed,
        _ => ExitResult::PartlyKept,
    }
}

/// Text for a handoff of no flow.
const NOTHING_TO_DO: &str =
    "no flow to hand off: no server program at this node has a connection that matches";

/// Maximum number of table rows: a larger handoff lists only the flows that stayed, and a summary.
const ROWS_MAX: usize = 40;

fn handoff_text(status: &HandoffStatus) -> String {
    if status.summary.total == 0 {
        return NOTHING_TO_DO.to_owned() + "\n";
    }
    let mut table = TextTable::new([
        "flow",
        "outcome",
        "freeze us",
        "divert",
        "extract",
        "transfer",
        "restore",
        "commit",
        "prepare",
        "bytes",
    ]);
    let is_long = status.results.len() > ROWS_MAX;
    let stayed = |result: &&FlowResult| !is_long || result.outcome != FlowOutcome::Moved;
    let mut rows = 0;
    for result in status.results.iter().filter(stayed) {
        table.row(row_cells(result));
        rows += 1;
    }
    let summary = &status.summary;
    let mut text = if rows > 0 {
        table.text()
    } else {
        String::new()
    };
    text += &format!(
        "{} of {} flows moved to {}",
        summary.moved, summary.total, summary.to
    );
    if summary.kept > 0 {
        text += &format!(", {} stayed", summary.kept);
    }
    let longest = status
        .results
        .iter()
        .filter_map(|result| result.freeze_us)
        .reduce(f64::max);
    if let Some(longest) = longest {
        text += &format!("; longest freeze {longest:.0} us");
    }
    text + "\n"
}

fn row_cells(result: &FlowResult) -> [String; 10] {
    let outcome = match &result.outcome {
        FlowOutcome::Moved => "moved".to_owned(),
        FlowOutcome::Pending => "not yet known".to_owned(),
        FlowOutcome::Kept { reason, .. } => format!("kept: {reason}"),
    };
    let moved = result.outcome == FlowOutcome::Moved;
    let phases = &result.phases_us;
    let [divert, extract, transfer, restore, commit, prepare] = [
        phases.divert,
        phases.extract,
        phases.transfer,
        phases.restore,
        phases.commit,
        phases.prepare,
    ]
    .map(|us| optional_micros(moved.then_some(us)));
    let bytes = if moved {
        result.bytes_transferred.to_string()
    } else {
        String::new()
    };
    let freeze = optional_micros(result.freeze_us);
    [
        result.flow.to_string(),
        outcome,
        freeze,
        divert,
        extract,
        transfer,
        restore,
        commit,
        prepare,
        bytes,
    ]
}

/// A progress line on the terminal, updated during the handoff.
struct ProgressLine {
    is_terminal: bool,
}

impl ProgressLine {
    fn new() -> Self {
        Self {
            is_terminal: stderr().is_terminal(),
        }
    }

    fn show(&self, status: &HandoffStatus) {
        if self.is_terminal {
            let summary = &status.summary;
            let done = summary.moved + summary.kept;
            // A closed terminal must not stop the handoff.
            let _ = write!(stderr(), "\r{done} of {} flows", summary.total);
        }
    }

    fn end(&mut self) {
        if self.is_terminal {
            let _ = write!(stderr(), "\r\x1b[K");
        }
    }
}

#[cfg(test)]
mod tests {
    use holdfast_api::control::{Blame, HandoffSummary, PhasesUs};

    use super::*;

    fn status(outcomes: Vec<FlowOutcome>) -> HandoffStatus {
        let moved = outcomes
            .iter()
            .filter(|outcome| **outcome == FlowOutcome::Moved)
            .count() as u64;
        let total = outcomes.len() as u64;
        let result = |outcome| FlowResult {
            flow: "tcp:10.0.0.1:80-10.0.1.2:4242".parse().unwrap(),
            freeze_us: (outcome == FlowOutcome::Moved).then_some(399.6),
            outcome,
            phases_us: PhasesUs {
                restore: 12.0,
                ..PhasesUs::default()
            },
            bytes_transferred: 100,
            send_queue_bytes: 0,
            drained: false,
            frozen_at_ns: None,
            active_at_ns: None,
        };
        HandoffStatus {
            summary: HandoffSummary {
                id: 1,
                to: "n2".into(),
                requested_by_operator: true,
                state: HandoffState::Finished,
                total,
                moved,
                kept: total - moved,
                started_at_ns: 0,
                finished_at_ns: None,
            },
            results: outcomes.into_iter().map(result).collect(),
        }
    }

    fn kept_outcome() -> FlowOutcome {
        FlowOutcome::Kept {
            reason: "n2 is not connected".into(),
            blame: Blame::Peer,
        }
    }

    #[test]
    fn table_shows_outcome_of_each_flow() {
        let text = handoff_text(&status(vec![FlowOutcome::Moved, kept_outcome()]));
        let lines: Vec<&str> = text.lines().collect();
        let cells = |line: &str| {
            line.split_whitespace()
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        let moved = "tcp:10.0.0.1:80-10.0.1.2:4242 moved 400 0 0 0 12 0 0 100";
        assert_eq!(cells(lines[1]).join(" "), moved);
        assert!(lines[2].contains("kept: n2 is not connected"), "{text}");
        assert_eq!(
            lines[3],
            "1 of 2 flows moved to n2, 1 stayed; longest freeze 400 us"
        );
    }

    #[test]
    fn handoff_of_no_flow_succeeds_and_says_so() {
        let status = status(Vec::new());
        assert!(handoff_text(&status).contains("no flow to hand off"));
        assert!(matches!(exit_result(&status), ExitResult::Success));
    }

    #[test]
    fn long_table_lists_only_kept_flows() {
        let mut outcomes = vec![FlowOutcome::Moved; 1000];
        outcomes.push(kept_outcome());
        assert_eq!(handoff_text(&status(outcomes)).lines().count(), 3);
        assert_eq!(
            handoff_text(&status(vec![FlowOutcome::Moved; 1000]))
                .lines()
                .count(),
            1
        );
    }

    #[test]
    fn exit_code_distinguishes_all_from_some() {
        assert!(matches!(
            exit_result(&status(vec![FlowOutcome::Moved])),
            ExitResult::Success
        ));
        assert!(matches!(
            exit_result(&status(vec![kept_outcome()])),
            ExitResult::Failed
        ));
        assert!(matches!(
            exit_result(&status(vec![FlowOutcome::Moved, kept_outcome()])),
            ExitResult::PartlyKept
        ));
    }
}
