//! `holdfast node list|leave|remove|promote`: the nodes of the group.

use std::time::Duration;

use anyhow::Result;
use clap::Args;
use holdfast_api::control::NodeEntry;

use crate::daemon_client::DaemonArgs;
use crate::output::{output, output_line, print_json};
use crate::table::{TextTable, optional_number};

/// Silence after which a node is shown as silent: several heartbeats.
const SILENT_AFTER: Duration = Duration::from_secs(1);

/// List the nodes of the group, as this node knows them
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  holdfast node list\n  holdfast node list --json | jq .nodes[].role"
)]
pub struct ListArgs {
    #[command(flatten)]
    daemon: DaemonArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Let this node leave its group. A contact node hands its role to a backup first
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  holdfast node leave && systemctl disable --now holdfastd\n\nA daemon that starts again joins \
                  again."
)]
pub struct LeaveArgs {
    #[command(flatten)]
    daemon: DaemonArgs,
}

/// Remove a node from the group. Run this at the contact node
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  holdfast node remove n4\n\nA node that cannot be reached joins again when it returns: stop its \
                  daemon, or revoke its certificate."
)]
pub struct RemoveArgs {
    #[command(flatten)]
    node: OneNodeArgs,
}

/// Make a backup the contact node. Run this at the contact node
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  holdfast node promote n2\n\nThe former contact node becomes the last backup."
)]
pub struct PromoteArgs {
    #[command(flatten)]
    node: OneNodeArgs,
}

#[derive(Debug, Args)]
struct OneNodeArgs {
    #[command(flatten)]
    daemon: DaemonArgs,
    /// Name of the node
    #[arg(value_name = "NODE")]
    name: String,
}

/// Runs `holdfast node list`.
///
/// # Errors
/// The daemon does not answer.
pub fn list(args: &ListArgs) -> Result<()> {
    let client = args.daemon.client()?;
    let nodes = args.daemon.ask(&client, |client| client.nodes())?;
    if args.json {
        return print_json(&nodes);
    }
    let mut table = TextTable::new(["node", "number", "role", "address", "state", "flows"]);
    for node in &nodes.nodes {
        table.row([
            node.name.clone(),
            node.id.to_string(),
            role_text(node),
            node.address.clone(),
            state_text(node),
            optional_number(node.flows),
        ]);
    }
    output!("{}", table.text());
    Ok(())
}

fn role_text(node: &NodeEntry) -> String {
    match (&node.role, node.contact_node) {
        (Some(role), _) => role.clone(),
        (None, true) => "contact node".to_owned(),
        (None, false) => "node".to_owned(),
    }
}

fn state_text(node: &NodeEntry) -> String {
    let silence = node.silent_ms.map(Duration::from_millis);
    let silence = silence.filter(|silence| *silence >= SILENT_AFTER);
    match (node.lease_ms, silence, &node.problem) {
        (Some(lease_ms), _, _) => format!("serves, lease of {lease_ms} ms"),
        _ if node.this_node => "this node".to_owned(),
        (None, _, Some(problem)) if !node.connected => format!("not connected: {problem}"),
        _ if !node.connected => "not connected".to_owned(),
        (None, Some(silence), _) => format!("connected, last heard {} s ago", silence.as_secs()),
        (None, None, _) => "connected".to_owned(),
    }
}

/// Runs `holdfast node leave`.
///
/// # Errors
/// The daemon does not answer, or the node cannot leave.
pub fn leave(args: &LeaveArgs) -> Result<()> {
    let client = args.daemon.client()?;
    args.daemon.ask(&client, |client| client.leave_group())?;
    output_line!("this node has left the group; stop its daemon, or it joins at its next start");
    Ok(())
}

/// Runs `holdfast node remove`.
///
/// # Errors
/// The daemon does not answer, or refuses.
pub fn remove(args: &RemoveArgs) -> Result<()> {
    let OneNodeArgs { daemon, name } = &args.node;
    let client = daemon.client()?;
    let change = daemon.ask(&client, |client| client.remove_node(name))?;
    output_line!("{name} is not in the group (view {})", change.epoch);
    Ok(())
}

/// Runs `holdfast node promote`.
///
/// # Errors
/// The daemon does not answer, or refuses.
pub fn promote(args: &PromoteArgs) -> Result<()> {
    let OneNodeArgs { daemon, name } = &args.node;
    let client = daemon.client()?;
    let change = daemon.ask(&client, |client| client.promote_node(name))?;
    output_line!("{name} is the contact node (view {})", change.epoch);
    Ok(())
}
