//! `holdfast flow`: connections and their owners.

use anyhow::{Result, anyhow};
use clap::{Args, Subcommand, ValueEnum};
use holdfast_api::control::{FlowDetail, FlowEntry, FlowList, FlowListQuery, FlowState};
use holdfast_api::{FlowText, Protocol};

use crate::daemon_client::DaemonArgs;
use crate::output::{output, print_json};
use crate::table::TextTable;

/// Connections and their owners
#[derive(Debug, Args)]
pub struct FlowArgs {
    #[command(subcommand)]
    action: FlowAction,
}

#[derive(Debug, Subcommand)]
enum FlowAction {
    List(FlowListArgs),
    Show(FlowShowArgs),
}

/// List the flows known to this node; the contact node knows all flows of the group
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  holdfast flow list\n  holdfast flow list --pool files --owner n2 --json"
)]
struct FlowListArgs {
    #[command(flatten)]
    daemon: DaemonArgs,
    /// Only flows of this pool
    #[arg(long)]
    pool: Option<String>,
    /// Only flows that this node owns
    #[arg(long, value_name = "NODE")]
    owner: Option<String>,
    /// Only flows of this protocol
    #[arg(long, value_enum)]
    protocol: Option<ProtocolArg>,
    /// Maximum number of flows
    #[arg(long, value_name = "N")]
    limit: Option<u64>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ProtocolArg {
    Tcp,
    Udp,
}

/// Show one flow: its owner, its socket, and reasons that prevent a handoff
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  holdfast flow show tcp:10.0.0.1:80-10.0.1.2:4242")]
struct FlowShowArgs {
    #[command(flatten)]
    daemon: DaemonArgs,
    /// tcp:LOCAL:PORT-REMOTE:PORT, with the service address as LOCAL
    #[arg(value_parser = parse_flow)]
    flow: FlowText,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Parses a flow's text form; the error contains an example.
pub fn parse_flow(text: &str) -> Result<FlowText> {
    let example = "for example tcp:10.0.0.1:80-10.0.1.2:4242 or tcp:[fd00::1]:80-[fd00::2]:4242";
    text.parse().map_err(|error| anyhow!("{error}, {example}"))
}

/// Runs `holdfast flow`.
///
/// # Errors
/// The daemon does not answer, or does not know the flow.
pub fn run(args: &FlowArgs) -> Result<()> {
    match &args.action {
        FlowAction::List(args) => list(args),
        FlowAction::Show(args) => show(args),
    }
}

fn list(args: &FlowListArgs) -> Result<()> {
    let query = FlowListQuery {
        pool: args.pool.clone(),
        owner: args.owner.clone(),
        protocol: args.protocol.map(|protocol| match protocol {
            ProtocolArg::Tcp => Protocol::Tcp,
            ProtocolArg::Udp => Protocol::Udp,
        }),
        limit: args.limit,
        after: None,
    };
    let client = args.daemon.client()?;
    // With a limit, one page is enough; without, fetch all pages.
    let flows = match args.limit {
        Some(_) => args.daemon.ask(&client, |client| client.flows(&query))?,
        None => args
            .daemon
            .ask(&client, |client| client.all_flows(&query))?,
    };
    if args.json {
        return print_json(&flows);
    }
    output!("{}", list_text(&flows));
    Ok(())
}

fn list_text(list: &FlowList) -> String {
    if list.flows.is_empty() {
        return "no flows\n".into();
    }
    let mut table = TextTable::new(["flow", "owner", "epoch", "pool", "program"]);
    for entry in &list.flows {
        let text = |value: &Option<String>| value.clone().unwrap_or_default();
        let epoch = entry.epoch.to_string();
        table.row([
            entry.flow.to_string(),
            owner_text(entry),
            epoch,
            text(&entry.pool),
            text(&entry.program),
        ]);
    }
    let mut text = table.text();
    let listed = list.flows.len() as u64;
    if list.total > listed {
        text += &format!("{listed} of {}\n", list.total);
    }
    text
}

fn owner_text(entry: &FlowEntry) -> String {
    match &entry.state {
        FlowState::Owned { owner } => owner.clone(),
        FlowState::Transit { donor, acceptor } => format!("{donor} -> {acceptor}"),
    }
}

fn show(args: &FlowShowArgs) -> Result<()> {
    let client = args.daemon.client()?;
    let detail = args.daemon.ask(&client, |client| client.flow(&args.flow))?;
    if args.json {
        return print_json(&detail);
    }
    output!("{}", show_text(&detail));
    Ok(())
}

fn show_text(detail: &FlowDetail) -> String {
    let entry = &detail.entry;
    let mut rows = vec![
        ("flow", entry.flow.to_string()),
        ("owner", owner_text(entry)),
        ("epoch", entry.epoch.to_string()),
        ("pool", entry.pool.clone().unwrap_or("unknown".into())),
        (
            "program",
            entry.program.clone().unwrap_or("none on this node".into()),
        ),
    ];
    if let Some(tcp) = &detail.tcp {
        rows.extend([
            ("state", tcp.state.clone()),
            ("round trip", format!("{} us", tcp.rtt_us)),
            (
                "congestion window",
                format!("{} segments of {} bytes", tcp.cwnd_segments, tcp.mss_bytes),
            ),
            ("unread", format!("{} bytes", tcp.unread_bytes)),
            (
                "send queue",
                format!(
                    "{} bytes, {} of them unsent",
                    tcp.send_queue_bytes, tcp.unsent_bytes
                ),
            ),
            ("retransmits", tcp.retransmits.to_string()),
        ]);
        rows.extend(
            tcp.predicted_drain_us
                .map(|us| ("predicted drain", format!("{us} us"))),
        );
    }
    rows.extend(
        detail
            .predicted_freeze_us
            .map(|us| ("predicted freeze", format!("{us} us"))),
    );
    rows.extend(
        detail
            .blockers
            .iter()
            .map(|blocker| ("cannot move", blocker.clone())),
    );
    rows.iter()
        .map(|(name, value)| format!("{name:<20}{value}\n"))
        .collect()
}
