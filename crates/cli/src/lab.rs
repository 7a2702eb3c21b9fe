//! `holdfast lab`: a test cluster on this machine.

use std::{os::unix::process::CommandExt, path::PathBuf, time::Instant};

use crate::output::output_line;
use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand, ValueEnum};
use holdfast_lab::{HostStatus, Lab, LabSpec, LabStatus, LinkEntry, ServiceReach, Topology};

/// A test cluster on this machine: hosts as namespaces, links with delay, rate and loss, faults. Needs root.
#[derive(Debug, Args)]
pub struct LabArgs {
    #[command(subcommand)]
    action: LabAction,
}

#[derive(Debug, Subcommand)]
enum LabAction {
    /// Bring a lab up; it stays until `down`
    Up(UpArgs),
    /// Take a lab down; also removes the remains of a killed process
    Down(NameArgs),
    /// Run a command inside a host (n1, c1, …) or inside the switch (sw)
    Exec(ExecArgs),
    /// Isolate a host; its link keeps the carrier
    Cut(FaultArgs),
    /// Undo cut
    Heal(FaultArgs),
    /// Show a lab's hosts, addresses and links
    Status(LabStatusArgs),
    /// List all labs
    List(LabListArgs),
    /// Remove the labs of killed processes
    Prune,
}

#[derive(Debug, Args)]
struct NameArgs {
    /// The lab's name
    #[arg(long, default_value = "default")]
    name: String,
}

#[derive(Debug, Args)]
struct UpArgs {
    #[command(flatten)]
    lab: NameArgs,
    /// Number of nodes n1, n2, …
    #[arg(long, default_value_t = 3)]
    nodes: u16,
    /// Number of clients c1, c2, …
    #[arg(long, default_value_t = 1)]
    clients: u16,
    /// Number of segments for the nodes; with more than one, clients have their own segment
    #[arg(long, default_value_t = 1)]
    segments: u16,
    /// Reach of the service address (packets' way to a flow's owner); recorded for tools that configure daemons
    #[arg(long, value_enum, default_value_t = LabReachArg::Steer)]
    reach: LabReachArg,
    /// Processors of each node, 0.1 to 1024, such as 0.2: a quota for every 10 ms. Clients have all processors
    #[arg(long, value_name = "N")]
    processors: Option<f64>,
    /// The links to which the next three options apply: a host, `nodes`, `clients` or `all`
    #[arg(long, default_value = "all", value_name = "HOST")]
    link: String,
    /// Delay of each link, in each direction, in milliseconds
    #[arg(long, value_name = "A")]
    delay_ms: Option<f64>,
    /// Rate of each link, in each direction, in Mbit/s
    #[arg(long, value_name = "B")]
    rate_mbit: Option<f64>,
    /// Loss on each link, in each direction, in percent
    #[arg(long, value_name = "C")]
    loss_pct: Option<f64>,
    /// Seed of packet loss: the same seed and the same packets give the same losses
    #[arg(long)]
    seed: Option<u64>,
    /// A TOML file that describes individual links; the options above override it
    #[arg(long, value_name = "FILE")]
    topology: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum LabReachArg {
    Steer,
    Broadcast,
}

#[derive(Debug, Args)]
struct ExecArgs {
    #[command(flatten)]
    lab: NameArgs,
    /// The host to run the command in
    host: String,
    /// The command and its arguments
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "CMD"
    )]
    command: Vec<std::ffi::OsString>,
}

#[derive(Debug, Args)]
struct FaultArgs {
    #[command(flatten)]
    lab: NameArgs,
    /// The host
    host: String,
    /// Apply only between the host and this one
    #[arg(long, value_name = "HOST")]
    from: Option<String>,
}

#[derive(Debug, Args)]
struct LabStatusArgs {
    #[command(flatten)]
    lab: NameArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct LabListArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs `holdfast lab`.
///
/// # Errors
/// Errors of the lab, worded for the user.
pub fn run(args: LabArgs) -> Result<()> {
    match args.action {
        LabAction::Up(args) => up(args),
        LabAction::Down(args) => Ok(holdfast_lab::down(&args.name)?),
        LabAction::Exec(args) => exec(&args),
        LabAction::Cut(FaultArgs { lab, host, from }) => {
            let lab = Lab::open(&lab.name)?;
            Ok(from.map_or_else(|| lab.cut(&host), |from| lab.cut_between(&host, &from))?)
        }
        LabAction::Heal(FaultArgs { lab, host, from }) => {
            let lab = Lab::open(&lab.name)?;
            Ok(from.map_or_else(|| lab.heal(&host), |from| lab.heal_between(&host, &from))?)
        }
        LabAction::Status(args) => status(&args),
        LabAction::List(args) => list(&args),
        LabAction::Prune => {
            for name in holdfast_lab::prune()? {
                output_line!("removed the remains of {name}");
            }
            Ok(())
        }
    }
}

fn up(args: UpArgs) -> Result<()> {
    let started = Instant::now();
    let mut spec = LabSpec::new(&args.lab.name)
        .nodes(args.nodes)
        .clients(args.clients)
        .segments(args.segments)
        .topology(build_topology(&args)?);
    spec.keep = true;
    spec.processors = args.processors;
    spec.reach = match args.reach {
        LabReachArg::Steer => ServiceReach::Steer,
        LabReachArg::Broadcast => ServiceReach::Broadcast,
    };
    let lab = Lab::up(&spec)?;
    print_table(&lab.status()?);
    output_line!("up after {:.2} s", started.elapsed().as_secs_f64());
    Ok(())
}

fn build_topology(args: &UpArgs) -> Result<Topology> {
    let mut topology = match &args.topology {
        Some(path) => Topology::read(path)?,
        None => Topology::default(),
    };
    if let Some(seed) = args.seed {
        topology.seed = seed;
    }
    let entry = LinkEntry {
        delay_ms: args.delay_ms,
        rate_mbit: args.rate_mbit,
        loss_pct: args.loss_pct,
        ..LinkEntry::for_host(&args.link)
    };
    let has_options =
        args.delay_ms.is_some() || args.rate_mbit.is_some() || args.loss_pct.is_some();
    Ok(if has_options {
        topology.with_entry(entry)
    } else {
        topology
    })
}

fn exec(args: &ExecArgs) -> Result<()> {
    let mut command = Lab::open(&args.lab.name)?.command(&args.host)?;
    // The command replaces this process, so its exit code and received signals are this process's.
    let error = command.args(&args.command).exec();
    bail!("run {:?}: {error}", command.get_program())
}

fn status(args: &LabStatusArgs) -> Result<()> {
    let status = Lab::open(&args.lab.name)?.status()?;
    if args.json {
        output_line!(
            "{}",
            serde_json::to_string_pretty(&status).context("encode the status")?
        );
    } else {
        print_table(&status);
    }
    Ok(())
}

fn list(args: &LabListArgs) -> Result<()> {
    let labs = holdfast_lab::list()?;
    if args.json {
        let labs: Vec<_> = labs
            .iter()
            .map(|(name, up)| serde_json::json!({"name": name, "up": up}))
            .collect();
        output_line!(
            "{}",
            serde_json::to_string_pretty(&labs).context("encode the list")?
        );
        return Ok(());
    }
    for (name, up) in labs {
        output_line!("{name:<20} {}", if up { "up" } else { "left over" });
    }
    Ok(())
}

fn print_table(status: &LabStatus) {
    let (service4, service6) = status.service;
    output_line!(
        "lab {}, number {}: service {service4} {service6}",
        status.name,
        status.plan.number
    );
    if let Some(processors) = status.processors {
        output_line!("processors of each node: {processors}");
    }
    output_line!(
        "{:<6}{:<9}{:<16}{:<24}{:<19}state",
        "host",
        "segment",
        "IPv4",
        "IPv6",
        "link address"
    );
    for host in &status.hosts {
        let location = &host.host;
        let (v4, v6, mac) = (
            location.v4.to_string(),
            location.v6.to_string(),
            location.mac.to_string(),
        );
        output_line!(
            "{:<6}{:<9}{v4:<16}{v6:<24}{mac:<19}{}",
            location.name,
            location.segment,
            host_state(host)
        );
    }
    for (a, b) in &status.cut_between {
        output_line!("cut between {a} and {b}");
    }
    if status.link_program == Some(false) {
        output_line!("the link program has ended: hosts behind it are cut off");
    }
}

fn host_state(host: &HostStatus) -> String {
    let mut states = vec![if host.alive {
        format!("{} processes", host.processes)
    } else {
        "gone".into()
    }];
    if host.cut {
        states.push("cut".into());
    }
    if let Some(counters) = host.counters {
        for (name, path) in [("up", counters.up), ("down", counters.down)] {
            let link = path.link;
            states.push(format!(
                "{name} {} passed {} lost {} dropped",
                link.delivered, link.lost, link.dropped
            ));
        }
    }
    states.join(", ")
}
