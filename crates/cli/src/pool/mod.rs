//! `holdfast pool`: shows pools and their elements, registers elements, and uses pools.

mod connect;
mod load_meter;
mod maintained_registration;
mod process_group;
mod program_process;
mod register;
mod resolve;
mod temporary_daemon;

pub use load_meter::parse_share;

use std::thread::sleep;
use std::time::Duration;

use anyhow::Result;
use clap::{Args, Subcommand};
use holdfast_api::control::{
    ClientError, ElementEntry, PeerList, PolicyDetail, PoolDetail, PoolList, PoolQuery,
};
use serde::Serialize;

use crate::ExitResult;
use crate::daemon_client::RegistrarDaemonArgs;
use crate::output::{is_closed, output, output_line, print_json};
use crate::table::TextTable;

/// Pools and their elements: register programs as elements, use pools, show a registrar's state
#[derive(Debug, Args)]
pub struct PoolArgs {
    #[command(subcommand)]
    action: PoolAction,
}

#[derive(Debug, Subcommand)]
enum PoolAction {
    Register(register::RegisterArgs),
    Resolve(resolve::ResolveArgs),
    Connect(connect::ConnectArgs),
    List(PoolListArgs),
    Show(PoolShowArgs),
    Watch(WatchArgs),
    Peers(PeersArgs),
}

/// List the pools of the scope
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  holdfast pool list\n  holdfast pool list --limit 10 --json")]
struct PoolListArgs {
    #[command(flatten)]
    daemon: RegistrarDaemonArgs,
    /// Maximum number of pools
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    limit: Option<u64>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Show one pool with its elements
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  holdfast pool show echo")]
struct PoolShowArgs {
    #[command(flatten)]
    daemon: RegistrarDaemonArgs,
    /// The pool's handle, as printed by `holdfast pool list`
    handle: String,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Show a pool, or the list of pools, each time it changes
///
/// A missing pool is shown without elements; the command waits for it, and for a registrar that ends meanwhile.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  holdfast pool watch\n  holdfast pool watch echo --json")]
struct WatchArgs {
    #[command(flatten)]
    daemon: RegistrarDaemonArgs,
    /// The pool's handle; without it, the list of pools
    handle: Option<String>,
    /// Seconds between two queries
    #[arg(long, value_name = "S", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    every: u64,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// List the other registrars of the scope
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  holdfast pool peers")]
struct PeersArgs {
    #[command(flatten)]
    daemon: RegistrarDaemonArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs `holdfast pool`.
///
/// # Errors
/// The daemon does not answer, or the requested object does not exist.
pub fn run(args: &PoolArgs) -> Result<ExitResult> {
    let done = |result: Result<()>| result.map(|()| ExitResult::Success);
    match &args.action {
        PoolAction::Register(args) => register::run(args),
        PoolAction::Resolve(args) => done(resolve::run(args)),
        PoolAction::Connect(args) => done(connect::run(args)),
        action => done(show_state(action)),
    }
}

/// Shows a registrar's state.
fn show_state(action: &PoolAction) -> Result<()> {
    match action {
        PoolAction::Register(_) | PoolAction::Resolve(_) | PoolAction::Connect(_) => Ok(()),
        PoolAction::List(args) => {
            let list = list(&args.daemon, args.limit)?;
            print(&list, args.json, list_text)
        }
        PoolAction::Show(args) => {
            let pool = show(&args.daemon, &args.handle)?;
            print(&pool, args.json, pool_text)
        }
        PoolAction::Watch(args) => watch(args),
        PoolAction::Peers(args) => {
            let client = args.daemon.client()?;
            let peers = args.daemon.ask(&client, |client| client.peers())?;
            print(&peers, args.json, peers_text)
        }
    }
}

fn print<T: Serialize>(value: &T, json: bool, text: fn(&T) -> String) -> Result<()> {
    if json {
        return print_json(value);
    }
    output!("{}", text(value));
    Ok(())
}

fn list(daemon: &RegistrarDaemonArgs, limit: Option<u64>) -> Result<PoolList> {
    let client = daemon.client()?;
    let query = PoolQuery { limit, after: None };
    // With a limit, one page is enough; without, fetch all pages.
    match limit {
        Some(_) => daemon.ask(&client, |client| client.pools(&query)),
        None => daemon.ask(&client, |client| client.all_pools(&query)),
    }
}

fn show(daemon: &RegistrarDaemonArgs, handle: &str) -> Result<PoolDetail> {
    let client = daemon.client()?;
    daemon.ask(&client, |client| client.pool(handle))
}

fn watch(args: &WatchArgs) -> Result<()> {
    match &args.handle {
        Some(handle) => print_changes(args, || show_or_empty(&args.daemon, handle), pool_text),
        None => print_changes(args, || list(&args.daemon, None), list_text),
    }
}

/// Returns a pool; without elements if it does not exist.
fn show_or_empty(daemon: &RegistrarDaemonArgs, handle: &str) -> Result<PoolDetail> {
    let result = show(daemon, handle);
    let absent = |error: &anyhow::Error| {
        let refused = error.downcast_ref::<ClientError>();
        matches!(refused, Some(ClientError::Refused { status: 404, .. }))
    };
    match result {
        Err(error) if absent(&error) => Ok(PoolDetail {
            handle: handle.to_owned(),
            policy: String::new(),
            total: 0,
            elements: Vec::new(),
        }),
        shown => shown,
    }
}

/// Queries repeatedly and prints changes. A registrar that is missing at the start is an error; later, the function
/// waits for it.
fn print_changes<T: Serialize + PartialEq>(
    args: &WatchArgs,
    query: impl Fn() -> Result<T>,
    text: fn(&T) -> String,
) -> Result<()> {
    let mut before = None;
    let mut last_error = false;
    loop {
        match query() {
            Ok(now) => {
                if before.as_ref() != Some(&now) {
                    if before.is_some() && !args.json {
                        output_line!();
                    }
                    print(&now, args.json, text)?;
                    if is_closed() {
                        return Ok(());
                    }
                    before = Some(now);
                }
                last_error = false;
            }
            Err(error) if before.is_none() => return Err(error),
            Err(error) => {
                if !last_error {
                    eprintln!("holdfast: {error:#}\nholdfast: querying again");
                }
                last_error = true;
            }
        }
        sleep(Duration::from_secs(args.every));
    }
}

fn list_text(list: &PoolList) -> String {
    if list.pools.is_empty() {
        return "no pools\n".into();
    }
    let mut table = TextTable::new(["pool", "policy", "elements"]);
    for pool in &list.pools {
        let elements = pool.elements.to_string();
        table.row([pool.handle.clone(), pool.policy.clone(), elements]);
    }
    let mut text = table.text();
    let listed = list.pools.len() as u64;
    if list.total > listed {
        text += &format!("{listed} of {}\n", list.total);
    }
    text
}

fn pool_text(pool: &PoolDetail) -> String {
    if pool.elements.is_empty() {
        return format!("pool {}: no elements\n", pool.handle);
    }
    let mut table = TextTable::new(["element", "home", "policy", "service"]);
    for element in &pool.elements {
        table.row([
            element.id.clone(),
            element.home.clone(),
            policy_text(&element.policy),
            service_text(element),
        ]);
    }
    let mut text = format!("pool {}, {}\n\n{}", pool.handle, pool.policy, table.text());
    let listed = pool.elements.len() as u64;
    if pool.total > listed {
        text += &format!("{listed} of {}\n", pool.total);
    }
    text
}

fn policy_text(policy: &PolicyDetail) -> String {
    let percent = |name: &str, value: Option<f64>| {
        value.map(|value| format!("{name} {:.2} %", value * 100.0))
    };
    let parameter = |name: &str, value: Option<u32>| value.map(|value| format!("{name} {value}"));
    let parameters = [
        parameter("weight", policy.weight),
        parameter("priority", policy.priority),
        percent("load", policy.load),
        percent("degradation", policy.degradation),
        percent("delay penalty", policy.delay_penalty),
        parameter("distance ms", policy.distance_ms),
    ];
    parameters
        .into_iter()
        .flatten()
        .collect::<Vec<_>>()
        .join(", ")
}

fn service_text(element: &ElementEntry) -> String {
    let addresses = element.addresses.iter().map(ToString::to_string);
    let addresses = addresses.collect::<Vec<_>>().join(" ");
    format!("{} {addresses}", element.transport)
        .trim_end()
        .to_owned()
}

fn peers_text(list: &PeerList) -> String {
    if list.peers.is_empty() {
        return "no other registrars\n".into();
    }
    let mut table = TextTable::new([
        "registrar",
        "addresses",
        "state",
        "elements",
        "checksum",
        "heard ms ago",
    ]);
    for peer in &list.peers {
        let addresses = peer.addresses.iter().map(ToString::to_string);
        let state = match (peer.active, peer.connected) {
            (true, true) => "active",
            (true, false) => "active, no association",
            (false, _) => "silent",
        };
        let checksum = match peer.announced_checksum {
            Some(announced) if announced == peer.checksum => "equal",
            Some(_) => "differs",
            None => "",
        };
        table.row([
            peer.id.clone(),
            addresses.collect::<Vec<_>>().join(" "),
            state.to_owned(),
            peer.elements.to_string(),
            checksum.to_owned(),
            peer.last_heard_ms.to_string(),
        ]);
    }
    table.text()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pool_table_shows_the_policy_parameters() {
        let element = ElementEntry {
            id: "00000011".into(),
            home: "eaf61848".into(),
            policy: PolicyDetail {
                name: "LU".into(),
                load: Some(0.25),
                ..PolicyDetail::default()
            },
            registration_life: 30_000,
            transport: "tcp".into(),
            addresses: vec!["10.0.0.1:80".parse().unwrap()],
            registrar_addresses: Vec::new(),
        };
        let pool = PoolDetail {
            handle: "echo".into(),
            policy: "LU".into(),
            total: 1,
            elements: vec![element],
        };
        let wanted = "pool echo, LU\n\nelement   home      policy        service\n00000011  eaf61848  load 25.00 %  tcp 10.0.0.1:80\n";
        assert_eq!(pool_text(&pool), wanted);
    }
}
