//! `holdfast replicate`: connections that survive their server.

use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand};
use holdfast_api::control::{
    BlockingControlClient, LegEntry, LegStanding, ReplicationEntry, ReplicationList,
    ReplicationRequest, ReplicationState,
};

use crate::daemon_client::DaemonArgs;
use crate::output::{output, output_line, print_json};
use crate::table::TextTable;

/// Interval between two looks at a replication that begins.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Longest wait for a replication to begin.
const BEGIN_MAX: Duration = Duration::from_secs(20);

/// Replicate a service: when a server dies, another one goes on inside the same TCP connections
///
/// The servers are ordinary programs, one at each node, which must have the same state when the replication begins. From then on
/// they get the same input. Give the command on the contact node.
#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true,
    after_help = "Examples:
  holdfast replicate redis --replicas 1
  holdfast replicate redis --replicas 2 --on n2,n3,n4
  holdfast replicate status
  holdfast replicate promote redis n3
  holdfast replicate stop redis

docs/replication.md says which servers can be replicated."
)]
pub struct ReplicateArgs {
    #[command(subcommand)]
    action: Option<ReplicateAction>,
    #[command(flatten)]
    start: StartArgs,
}

#[derive(Debug, Args)]
struct StartArgs {
    #[command(flatten)]
    daemon: DaemonArgs,
    /// The service's name
    #[arg(required = true)]
    service: Option<String>,
    /// Number of replicas beside the primary
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=3))]
    replicas: u8,
    /// Nodes with the servers, the primary's first [default: nodes with a server that is well, server nodes before backups]
    #[arg(long, value_name = "NODES", value_delimiter = ',')]
    on: Vec<String>,
}

#[derive(Debug, Subcommand)]
enum ReplicateAction {
    Status(StatusArgs),
    Promote(PromoteArgs),
    Stop(StopArgs),
}

/// Show the replicated services: servers, connections, what happened
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  holdfast replicate status
  holdfast replicate status --json | jq '.services[].legs'")]
struct StatusArgs {
    #[command(flatten)]
    daemon: DaemonArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Make a replica the primary: clients see its output from now on
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  holdfast replicate promote redis n3")]
struct PromoteArgs {
    #[command(flatten)]
    daemon: DaemonArgs,
    /// The service's name
    service: String,
    /// The node with the replica
    node: String,
}

/// Stop to replicate: the primary serves alone, and connections go on
#[derive(Debug, Args)]
#[command(after_help = "Example:
  holdfast replicate stop redis

Replication ends when the last connection has ended. All other nodes then have weight 0 for the service, since their servers may
lack input; `holdfast service set` gives them clients again.")]
struct StopArgs {
    #[command(flatten)]
    daemon: DaemonArgs,
    /// The service's name
    service: String,
}

/// Runs `holdfast replicate`.
///
/// # Errors
/// The daemon does not answer, or refuses.
pub fn run(args: &ReplicateArgs) -> Result<()> {
    match &args.action {
        None => start(&args.start),
        Some(ReplicateAction::Status(args)) => status(args),
        Some(ReplicateAction::Promote(args)) => {
            let client = args.daemon.client()?;
            let request = ReplicationRequest::Promote {
                service: args.service.clone(),
                node: args.node.clone(),
            };
            args.daemon
                .ask(&client, |client| client.change_replication(&request))?;
            output_line!("{} is the primary of {}", args.node, args.service);
            Ok(())
        }
        Some(ReplicateAction::Stop(args)) => {
            let client = args.daemon.client()?;
            let request = ReplicationRequest::Stop {
                service: args.service.clone(),
            };
            args.daemon
                .ask(&client, |client| client.change_replication(&request))?;
            output_line!("the primary of {} serves alone", args.service);
            Ok(())
        }
    }
}

fn start(args: &StartArgs) -> Result<()> {
    let service = args.service.clone().context("name a service")?;
    let client = args.daemon.client()?;
    let request = ReplicationRequest::Start {
        service: service.clone(),
        replicas: args.replicas,
        nodes: args.on.clone(),
    };
    args.daemon
        .ask(&client, |client| client.change_replication(&request))?;
    let entry = wait_until_begun(&args.daemon, &client, &service)?;
    output!("{}", entry_text(&entry));
    Ok(())
}

/// Waits until the servers of all legs answer, or replication begins without some.
fn wait_until_begun(
    daemon: &DaemonArgs,
    client: &BlockingControlClient,
    service: &str,
) -> Result<ReplicationEntry> {
    let begun = Instant::now();
    loop {
        let list = daemon.ask(client, |client| client.replications())?;
        let mut services = list.services.into_iter();
        let entry = services.find(|entry| entry.service == service);
        match entry {
            Some(entry) if entry.state != ReplicationState::Preparing => return Ok(entry),
            Some(entry) if begun.elapsed() > BEGIN_MAX && !entry.problems.is_empty() => {
                bail!("{}", entry.problems.join("\n"));
            }
            _ if begun.elapsed() > BEGIN_MAX => {
                bail!("the replication of {service} does not begin; look at the daemon's log");
            }
            _ => sleep(POLL_INTERVAL),
        }
    }
}

fn status(args: &StatusArgs) -> Result<()> {
    let client = args.daemon.client()?;
    let list = args.daemon.ask(&client, |client| client.replications())?;
    if args.json {
        return print_json(&list);
    }
    output!("{}", list_text(&list));
    Ok(())
}

fn list_text(list: &ReplicationList) -> String {
    match list.services.is_empty() {
        true => "no service is replicated\n".to_owned(),
        false => list
            .services
            .iter()
            .map(entry_text)
            .collect::<Vec<_>>()
            .join("\n"),
    }
}

fn entry_text(entry: &ReplicationEntry) -> String {
    let by = entry
        .replicator
        .as_deref()
        .unwrap_or("a node that has left");
    let mut text = format!(
        "{} at {}, replicated by {by}: {}, {} connections, {} promotions, {} differing outputs\n",
        entry.service,
        entry.address,
        state_text(entry.state),
        entry.connections,
        entry.promotions,
        entry.divergence_count
    );
    let mut table = TextTable::new(["  node", "role", "standing", "lag bytes"]);
    for leg in &entry.legs {
        table.row([
            format!("  {}", leg.node),
            if leg.primary { "primary" } else { "replica" }.to_owned(),
            standing_text(leg).to_owned(),
            leg.lag_bytes.to_string(),
        ]);
    }
    text += &table.text();
    for dropped in &entry.dropped {
        text += &format!("  {} was dropped: {}\n", dropped.node, dropped.reason);
    }
    for divergence in &entry.divergences {
        text += &format!(
            "  the output of {} for {} differs within the bytes up to {}\n",
            divergence.node, divergence.client, divergence.position
        );
    }
    for problem in &entry.problems {
        text += &format!("  {problem}\n");
    }
    text
}

fn state_text(state: ReplicationState) -> &'static str {
    match state {
        ReplicationState::Preparing => "preparing",
        ReplicationState::Full => "full protection",
        ReplicationState::Reduced => "reduced protection",
        ReplicationState::Alone => "no protection",
        ReplicationState::Dead => "dead",
        ReplicationState::Ending => "ending",
        ReplicationState::Elsewhere => "see there",
        ReplicationState::Interrupted => "interrupted",
    }
}

fn standing_text(leg: &LegEntry) -> &'static str {
    match leg.standing {
        None => "-",
        Some(LegStanding::Sound) => "sound",
        Some(LegStanding::Suspected) => "silent",
        Some(LegStanding::CatchingUp) => "catching up",
        Some(LegStanding::Uncompared) => "not compared",
        Some(LegStanding::Diverged) => "differs",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_api::control::DroppedLeg;

    fn entry() -> ReplicationEntry {
        ReplicationEntry {
            service: "redis".into(),
            address: "10.9.0.1:6379".parse().unwrap(),
            state: ReplicationState::Alone,
            replicator: Some("n1".into()),
            wanted_replicas: 1,
            legs: vec![LegEntry {
                node: "n3".into(),
                primary: true,
                standing: Some(LegStanding::Sound),
                lag_bytes: 0,
            }],
            connections: 1,
            unreplicated_connections: 0,
            promotions: 1,
            dropped: vec![DroppedLeg {
                node: "n2".into(),
                reason: "no server listens at its node".into(),
            }],
            divergence_count: 0,
            divergences: Vec::new(),
            problems: Vec::new(),
        }
    }

    #[test]
    fn status_shows_legs_and_dropped_ones() {
        let list = ReplicationList {
            services: vec![entry()],
        };
        assert_eq!(
            list_text(&list),
            "redis at 10.9.0.1:6379, replicated by n1: no protection, 1 connections, 1 promotions, 0 differing outputs\n\
             \u{20} node  role     standing  lag bytes\n\
             \u{20} n3    primary  sound     0\n\
             \u{20} n2 was dropped: no server listens at its node\n"
        );
        assert_eq!(
            list_text(&ReplicationList::default()),
            "no service is replicated\n"
        );
    }

    #[test]
    fn actions_and_services_are_told_apart() {
        #[derive(Debug, clap::Parser)]
        struct Line {
            #[command(flatten)]
            args: ReplicateArgs,
        }
        let parse = |line: &str| <Line as clap::Parser>::try_parse_from(line.split(' '));
        let started = parse("x redis --replicas 2 --on n2,n3,n4").unwrap().args;
        assert!(started.action.is_none());
        assert_eq!(started.start.on, ["n2", "n3", "n4"]);
        assert!(parse("x status").unwrap().args.action.is_some());
        assert!(parse("x redis --replicas 4").is_err());
        assert!(parse("x").is_err());
    }
}
