//! `holdfast status`.

use anyhow::Result;
use clap::Args;
use holdfast_api::control::{MembershipReport, NodeList, ServerHealth, ServiceNode, Status};

use crate::daemon_client::DaemonArgs;
use crate::output::{output, print_json};
use crate::table::{TextTable, optional_micros, optional_number};

/// Show this node's status, and its view of the group
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  holdfast status\n  holdfast status --json | jq .nodes")]
pub struct StatusArgs {
    #[command(flatten)]
    daemon: DaemonArgs,
    /// Print JSON: {"status": …, "nodes": …}
    #[arg(long)]
    json: bool,
}

/// Runs `holdfast status`.
///
/// # Errors
/// The daemon does not answer.
pub fn run(args: &StatusArgs) -> Result<()> {
    let client = args.daemon.client()?;
    let status = args.daemon.ask(&client, |client| client.status())?;
    let nodes = args.daemon.ask(&client, |client| client.nodes())?;
    if args.json {
        return print_json(&serde_json::json!({"status": status, "nodes": nodes.nodes}));
    }
    output!("{}", status_text(&status, &nodes));
    Ok(())
}

/// Returns a line about a group that runs itself.
fn membership_text(membership: &MembershipReport) -> String {
    let list = |names: &[String]| match names.is_empty() {
        true => "none".to_owned(),
        false => names.join(", "),
    };
    let lease = membership
        .lease_ms
        .map(|lease_ms| format!(", lease of {lease_ms} ms"));
    let store = membership.store.as_ref().map(|store| {
        let state = match store.answers {
            Some(true) => " (answers)",
            Some(false) => " (does not answer)",
            None => "",
        };
        format!("; views in {}{state}", store.kind)
    });
    format!(
        "view {}: this node is {}{}; contact node {}, backups: {}; server nodes: {}{}\n\n",
        membership.epoch,
        membership.role,
        lease.unwrap_or_default(),
        membership.contact_node.as_deref().unwrap_or("unknown"),
        list(&membership.backups),
        list(&membership.server_nodes),
        store.unwrap_or_default()
    )
}

fn status_text(status: &Status, nodes: &NodeList) -> String {
    let mut text = format!(
        "node {} (number {}) of group {}, reach {}, contact node {}; holdfastd {}, up {} s\n\n",
        status.node,
        status.node_id,
        status.group,
        status.reach,
        status.contact_node,
        status.version,
        status.uptime_s
    );
    text += &status
        .membership
        .as_ref()
        .map(membership_text)
        .unwrap_or_default();
    let mut table = TextTable::new(["node", "address", "connection", "rtt us", "weight", "flows"]);
    for node in &nodes.nodes {
        let connection = match (&node.problem, node.connected) {
            _ if node.this_node => "this node".to_owned(),
            (None, true) => "connected".to_owned(),
            (Some(problem), true) => format!("connected, {problem}"),
            (Some(problem), false) => format!("none: {problem}"),
            (None, false) => "none".to_owned(),
        };
        let (rtt, weight) = (optional_micros(node.rtt_us), node.weight.to_string());
        table.row([
            node.name.clone(),
            node.address.clone(),
            connection,
            rtt,
            weight,
            optional_number(node.flows),
        ]);
    }
    text += &table.text();
    let mut table = TextTable::new(["service", "pool", "server here", "new clients go to"]);
    for service in &status.services {
        table.row([
            format!("{}:{}", service.protocol, service.address),
            service.pool.clone(),
            server_text(&service.server).to_owned(),
            placement_text(&service.nodes),
        ]);
    }
    text += &format!("\n{}", table.text());
    let mut table = TextTable::new(["server program", "pid", "pools", "flows"]);
    for program in &status.programs {
        let (pid, pools) = (program.pid.to_string(), program.pools.join(", "));
        table.row([program.name.clone(), pid, pools, program.flows.to_string()]);
    }
    if status.programs.is_empty() {
        text += "\nno server program has a session with this daemon\n";
    } else {
        text += &format!("\n{}", table.text());
    }
    text += &residents_text(status);
    let (flows, handoffs) = (&status.flows, &status.handoffs);
    text += &format!(
        "\nflows: {} owned, {} in transit, {} moved away; handoffs: {} given, {} taken, {} kept\n",
        flows.owned, flows.transit, flows.moved, handoffs.donated, handoffs.accepted, handoffs.kept
    );
    if flows.disputed > 0 {
        text += &format!("flows that two nodes claim: {}\n", flows.disputed);
    }
    if status.draining {
        text += "this node is being drained: it takes no processes, and no new clients that another node can serve\n";
    }
    text + &status
        .problems
        .iter()
        .map(|problem| format!("problem: {problem}\n"))
        .collect::<String>()
}

fn server_text(server: &ServerHealth) -> &'static str {
    match server {
        ServerHealth::Unknown => "unknown",
        ServerHealth::Serving => "serves",
        ServerHealth::Absent => "none",
        ServerHealth::Failing { .. } => "fails",
    }
}

/// Returns the names of the nodes that get new clients, as the contact node knows them.
fn placement_text(nodes: &[ServiceNode]) -> String {
    if nodes.is_empty() {
        return "as the contact node decides".to_owned();
    }
    let placed = nodes.iter().filter(|node| node.placed_weight > 0);
    let names: Vec<&str> = placed.map(|node| node.node.as_str()).collect();
    names.join(", ")
}

/// Returns a table of the processes that were migrated to this node.
fn residents_text(status: &Status) -> String {
    if status.residents.is_empty() {
        return String::new();
    }
    let mut table = TextTable::new(["process moved in", "pid", "from", "moves"]);
    for process in &status.residents {
        let (pid, moves) = (process.pid.to_string(), process.moves.to_string());
        table.row([process.name.clone(), pid, process.from.clone(), moves]);
    }
    format!("\n{}", table.text())
}
