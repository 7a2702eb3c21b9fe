//! `holdfast service`: the services of the group.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::net::IpAddr;
use std::str::FromStr;

use anyhow::{Context, Result, bail, ensure};
use clap::{Args, Subcommand, ValueEnum};
use holdfast_api::Protocol;
use holdfast_api::control::{
    CheckSettings, FlowPlacementRule, NewService, ServerChecks, ServiceChange,
    ServiceChangeRequest, ServiceChanged, ServiceEntry, ServiceList, ServiceSettings,
    ServiceSource, ServiceUpdate,
};

use crate::daemon_client::DaemonArgs;
use crate::output::{output, output_line, print_json};
use crate::pool::parse_share;
use crate::table::TextTable;

/// The services of the group: addresses that clients connect to, and how nodes share new clients
#[derive(Debug, Args)]
pub struct ServiceArgs {
    #[command(subcommand)]
    action: ServiceAction,
}

#[derive(Debug, Subcommand)]
enum ServiceAction {
    Add(AddArgs),
    Set(SetArgs),
    Remove(RemoveArgs),
    List(ListArgs),
}

/// Add a service to the group, at any of its nodes
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  holdfast service add web --address 10.9.0.1 --port 80
  holdfast service add web --address 10.9.0.1 --address fd00:9::1 --port 80 --policy LUD --load-degradation 0.01
  holdfast service add dns --address 10.9.0.2 --port 53 --protocol udp --weight n1=2 --weight n3=0
  holdfast service add api --address 10.9.0.3 --port 443 --check connect --check-script check-api")]
struct AddArgs {
    #[command(flatten)]
    daemon: DaemonArgs,
    /// The service's name, which is also the pool handle of its server programs: lower-case letters, digits and hyphens
    name: String,
    /// An address that clients connect to and no host has; repeatable
    #[arg(long, required = true)]
    address: Vec<IpAddr>,
    /// The port
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    port: u16,
    /// The protocol
    #[arg(long, value_enum, default_value_t)]
    protocol: ProtocolArg,
    #[command(flatten)]
    settings: SettingsArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Change a service while traffic flows; existing connections stay where they are
///
/// Port and protocol of a service cannot change: add another service instead.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  holdfast service set web --policy LU-DPF --load-dpf 0.001
  holdfast service set web --weight n2=0 --weight n3=default
  holdfast service set web --add-address 10.9.0.7 --remove-address 10.9.0.1
  holdfast service set web --check connect --check-interval 2000
  holdfast service set web --check none")]
struct SetArgs {
    #[command(flatten)]
    daemon: DaemonArgs,
    /// The service's name
    name: String,
    /// An address to add; repeatable
    #[arg(long, value_name = "ADDRESS")]
    add_address: Vec<IpAddr>,
    /// An address to remove; its connections go on until they end; repeatable
    #[arg(long, value_name = "ADDRESS")]
    remove_address: Vec<IpAddr>,
    #[command(flatten)]
    settings: SettingsArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Remove a service: its connections go on until they end, and there are no new ones
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  holdfast service remove web")]
struct RemoveArgs {
    #[command(flatten)]
    daemon: DaemonArgs,
    /// The service's name
    name: String,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// List the services of the group
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  holdfast service list\n  holdfast service list --json | jq '.services[].shares'"
)]
struct ListArgs {
    #[command(flatten)]
    daemon: DaemonArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct SettingsArgs {
    /// The pool policy by which nodes share new clients: RR, WRR, RAND, WRAND, PRIO, LU, LUD, PLU, PLUD, RLU, RLUD,
    /// RPLU, RPLUD, WRAND-DPF, LU-DPF, LUD-DPF, PLU-DPF, PLUD-DPF [default of a new service: WRAND]
    #[arg(long)]
    policy: Option<String>,
    /// Increase of a node's load by one of 256 shares of new clients, 0 to 1 or in percent, for the policies with
    /// degradation
    #[arg(long, value_name = "SHARE", value_parser = parse_share)]
    load_degradation: Option<f64>,
    /// Increase of a node's load per millisecond of distance, 0 to 1 or in percent, for the DPF policies
    #[arg(long, value_name = "SHARE", value_parser = parse_share)]
    load_dpf: Option<f64>,
    /// Choice of the slot of a new client: by a hash of its address and port, or all clients of the service at one node
    #[arg(long, value_enum)]
    placement: Option<PlacementArg>,
    /// A node's weight, 0 to 1000; 0: no new clients; `default`: 1, as for nodes that are not named; repeatable
    #[arg(long, value_name = "NODE=N")]
    weight: Vec<WeightArg>,
    /// Default time that a handoff may wait for the send queue to empty, in milliseconds; 0: no wait
    #[arg(long, value_name = "MS")]
    drain: Option<u32>,
    /// A check that each node makes of its own server: `connect` connects to it (TCP); `none` ends all checks. The checks
    /// that --check and --check-script name replace the former ones
    #[arg(long, value_enum, value_name = "CHECK")]
    check: Option<CheckArg>,
    /// A check script that each node runs; exit code 0 means that the server is well. A file name in each node's directory
    /// of check scripts, by default /etc/holdfast/checks; file and directory must belong to root
    #[arg(long, value_name = "NAME")]
    check_script: Option<String>,
    /// Time between two checks in milliseconds, 100 to 600000 [default of a new service: 1000]
    #[arg(long, value_name = "MS")]
    check_interval: Option<u32>,
    /// Time limit of a check in milliseconds [default of a new service: 500]
    #[arg(long, value_name = "MS")]
    check_timeout: Option<u32>,
    /// Consecutive failed checks after which a server gets no new clients, 1 to 100 [default of a new service: 2]
    #[arg(long, value_name = "N")]
    check_fall: Option<u32>,
    /// Consecutive good checks after which a server gets new clients again, 1 to 100 [default of a new service: 2]
    #[arg(long, value_name = "N")]
    check_rise: Option<u32>,
    /// Time after which a server that takes none of its waiting clients, or reads none of their requests, gets no new
    /// clients, in milliseconds; 0: never [default of a new service: 500]
    #[arg(long, value_name = "MS")]
    stall: Option<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum CheckArg {
    Connect,
    None,
}

#[derive(Clone, Copy, Debug, Default, ValueEnum)]
enum ProtocolArg {
    #[default]
    Tcp,
    Udp,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum PlacementArg {
    Hash,
    Port,
}

/// A node's weight; none for the default.
#[derive(Clone, Debug, PartialEq, Eq)]
struct WeightArg {
    node: String,
    weight: Option<u32>,
}

impl FromStr for WeightArg {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<WeightArg> {
        let form = || format!("`{text}` is not NODE=N, such as n1=2 or n1=default");
        let (node, weight) = text.split_once('=').with_context(form)?;
        ensure!(!node.is_empty(), form());
        let weight = match weight {
            "default" => None,
            number => Some(number.parse().with_context(form)?),
        };
        Ok(WeightArg {
            node: node.to_owned(),
            weight,
        })
    }
}

impl SettingsArgs {
    fn settings(&self) -> Result<ServiceSettings> {
        let mut weights = BTreeMap::new();
        for WeightArg { node, weight } in &self.weight {
            if weights.insert(node.clone(), *weight).is_some() {
                bail!("--weight names {node} twice");
            }
        }
        Ok(ServiceSettings {
            policy: self.policy.clone(),
            load_degradation: self.load_degradation,
            load_dpf: self.load_dpf,
            placement: self.placement.map(|placement| match placement {
                PlacementArg::Hash => FlowPlacementRule::Hash,
                PlacementArg::Port => FlowPlacementRule::Port,
            }),
            weights,
            drain_ms: self.drain,
            checks: self.checks()?,
        })
    }

    fn checks(&self) -> Result<CheckSettings> {
        ensure!(
            self.check != Some(CheckArg::None) || self.check_script.is_none(),
            "--check none ends all checks; leave --check-script out, or name the checks that the service shall have"
        );
        let are_named = self.check.is_some() || self.check_script.is_some();
        Ok(CheckSettings {
            connect: are_named.then_some(self.check == Some(CheckArg::Connect)),
            script: are_named.then(|| self.check_script.clone().unwrap_or_default()),
            interval_ms: self.check_interval,
            timeout_ms: self.check_timeout,
            fall: self.check_fall,
            rise: self.check_rise,
            stall_ms: self.stall,
        })
    }
}

/// Runs `holdfast service`.
///
/// # Errors
/// The daemon does not answer, or the group refuses the change.
pub fn run(args: &ServiceArgs) -> Result<()> {
    match &args.action {
        ServiceAction::Add(args) => {
            let new = NewService {
                name: args.name.clone(),
                addresses: args.address.clone(),
                port: args.port,
                protocol: match args.protocol {
                    ProtocolArg::Tcp => Protocol::Tcp,
                    ProtocolArg::Udp => Protocol::Udp,
                },
                settings: args.settings.settings()?,
            };
            let done = format!("service {} added", args.name);
            change(&args.daemon, ServiceChange::Add(new), args.json, &done)
        }
        ServiceAction::Set(args) => {
            let update = ServiceUpdate {
                name: args.name.clone(),
                added_addresses: args.add_address.clone(),
                removed_addresses: args.remove_address.clone(),
                settings: args.settings.settings()?,
            };
            let nothing = ServiceUpdate {
                name: args.name.clone(),
                ..ServiceUpdate::default()
            };
            ensure!(
                update != nothing,
                "name something to change; `holdfast service set --help` shows the options"
            );
            let done = format!("service {} changed", args.name);
            change(&args.daemon, ServiceChange::Set(update), args.json, &done)
        }
        ServiceAction::Remove(args) => {
            let removal = ServiceChange::Remove(args.name.clone());
            let done = format!(
                "service {} removed; its connections go on until they end",
                args.name
            );
            change(&args.daemon, removal, args.json, &done)
        }
        ServiceAction::List(args) => list(args),
    }
}

fn change(daemon: &DaemonArgs, change: ServiceChange, json: bool, done: &str) -> Result<()> {
    let request = ServiceChangeRequest {
        id: Some(RandomState::new().hash_one(std::process::id())),
        change,
    };
    let client = daemon.client()?;
    let changed: ServiceChanged = daemon.ask(&client, |client| client.change_services(&request))?;
    if json {
        return print_json(&changed);
    }
    output_line!(
        "{done} (version {} of the group's settings)",
        changed.version
    );
    Ok(())
}

fn list(args: &ListArgs) -> Result<()> {
    let client = args.daemon.client()?;
    let list = args.daemon.ask(&client, |client| client.services())?;
    if args.json {
        return print_json(&list);
    }
    output!("{}", list_text(&list));
    Ok(())
}

fn list_text(list: &ServiceList) -> String {
    let mut text = match list.services.is_empty() {
        true => "no services\n".to_owned(),
        false => table_of(&list.services),
    };
    text.extend(list.services.iter().filter_map(checks_text));
    text += &match list.source {
        ServiceSource::File => "from [[service]] in this node's file\n".to_owned(),
        ServiceSource::Group => format!("version {} of the group's settings\n", list.version),
    };
    text
}

fn table_of(services: &[ServiceEntry]) -> String {
    let heading = [
        "service",
        "protocol",
        "port",
        "addresses",
        "policy",
        "shares of new clients",
    ];
    let mut table = TextTable::new(heading);
    for service in services {
        let addresses = service.addresses.iter().map(IpAddr::to_string);
        let ending = service.ending_addresses.iter();
        let ending = ending.map(|address| format!("{address} (ending)"));
        let addresses: Vec<String> = addresses.chain(ending).collect();
        table.row([
            service.name.clone(),
            service.protocol.to_string(),
            service.port.to_string(),
            addresses.join(", "),
            policy_text(service),
            shares_text(&service.shares),
        ]);
    }
    table.text()
}

fn policy_text(service: &ServiceEntry) -> String {
    match service.placement {
        FlowPlacementRule::Hash => service.policy.clone(),
        FlowPlacementRule::Port => format!("{}, all at one node", service.policy),
    }
}

/// Returns a line about the checks of a service; none for a service without active checks.
fn checks_text(service: &ServiceEntry) -> Option<String> {
    let ServerChecks {
        connect,
        script,
        interval_ms,
        timeout_ms,
        fall,
        rise,
        stall_ms: _,
    } = &service.checks;
    let connect = connect.then_some("connect");
    let checks: Vec<&str> = connect.into_iter().chain(script.as_deref()).collect();
    (!checks.is_empty()).then(|| {
        format!(
            "{} is checked every {interval_ms} ms by {} (limit {timeout_ms} ms, fall {fall}, rise {rise})\n",
            service.name,
            checks.join(" and ")
        )
    })
}

/// Returns the shares in percent.
fn shares_text(shares: &BTreeMap<String, u32>) -> String {
    let total: u64 = shares.values().map(|share| u64::from(*share)).sum();
    let percent = |share: u32| 100.0 * f64::from(share) / total.max(1) as f64;
    let shares = shares
        .iter()
        .map(|(node, share)| format!("{node} {:.0}%", percent(*share)));
    shares.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn web() -> ServiceEntry {
        ServiceEntry {
            name: "web".into(),
            protocol: Protocol::Tcp,
            port: 80,
            addresses: vec!["10.9.0.1".parse().unwrap()],
            ending_addresses: vec!["fd00::9".parse().unwrap()],
            placement: FlowPlacementRule::Hash,
            policy: "WRR".into(),
            load_degradation: 0.0,
            load_dpf: 0.0,
            weights: [("n1".to_owned(), 1), ("n2".to_owned(), 3)].into(),
            shares: [("n1".to_owned(), 1), ("n2".to_owned(), 3)].into(),
            drain_ms: None,
            checks: ServerChecks::default(),
        }
    }

    #[test]
    fn list_shows_shares_and_ending_addresses() {
        let list = ServiceList {
            source: ServiceSource::Group,
            version: 7,
            services: vec![web()],
        };
        assert_eq!(
            list_text(&list),
            "service  protocol  port  addresses                   policy  shares of new clients\n\
             web      tcp       80    10.9.0.1, fd00::9 (ending)  WRR     n1 25%, n2 75%\n\
             version 7 of the group's settings\n"
        );
    }

    #[test]
    fn list_shows_checks() {
        let mut service = web();
        service.checks = ServerChecks {
            connect: true,
            script: Some("/etc/holdfast/checks/web".into()),
            ..ServerChecks::default()
        };
        assert_eq!(
            checks_text(&service).unwrap(),
            "web is checked every 1000 ms by connect and /etc/holdfast/checks/web (limit 500 ms, fall 2, rise 2)\n"
        );
        assert_eq!(checks_text(&web()), None);
    }

    #[test]
    fn named_checks_replace_the_former_ones() {
        #[derive(clap::Parser)]
        struct Line {
            #[command(flatten)]
            settings: SettingsArgs,
        }
        let checks = |line: &str| {
            let line = <Line as clap::Parser>::parse_from(line.split(' '));
            line.settings.checks()
        };
        let named = |connect, script: &str| CheckSettings {
            connect: Some(connect),
            script: Some(script.to_owned()),
            ..CheckSettings::default()
        };
        assert_eq!(checks("set").unwrap(), CheckSettings::default());
        assert_eq!(checks("set --check connect").unwrap(), named(true, ""));
        assert_eq!(checks("set --check none").unwrap(), named(false, ""));
        let script = checks("set --check-script web").unwrap();
        assert_eq!(script, named(false, "web"));
        let both = checks("set --check connect --check-script web").unwrap();
        assert_eq!(both, named(true, "web"));
        assert!(checks("set --check none --check-script web").is_err());
        let fall = checks("set --check-fall 3").unwrap();
        assert_eq!(
            (fall.fall, fall.connect, fall.script),
            (Some(3), None, None)
        );
    }

    #[test]
    fn weights_are_read_or_refused() {
        let weight = |text: &str| text.parse::<WeightArg>();
        let node = "n1".to_owned();
        let is = |weight| WeightArg {
            node: node.clone(),
            weight,
        };
        assert_eq!(weight("n1=3").unwrap(), is(Some(3)));
        assert_eq!(weight("n1=default").unwrap(), is(None));
        for wrong in ["n1", "=3", "n1=", "n1=-1"] {
            let error = format!("{:#}", weight(wrong).unwrap_err());
            assert!(error.contains("NODE=N"), "{error}");
        }
    }
}
