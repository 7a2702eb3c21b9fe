//! `holdfast group`: makes a group, makes the tokens with which hosts join it, and decides for a group that cannot.

mod contact_takeover;

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow, ensure};
use clap::{Args, Subcommand, ValueEnum};
use holdfast_api::ca::{CertificateAuthority, CertificateRequest, NodeRole, RENEWED_DAYS};
use holdfast_api::control::{NewToken, TOKEN_LIFETIME_S, TokenEntry, TokenRequest, TokenState};
use holdfast_api::enrolment::{DEFAULT_ENROLMENT_PORT, GroupReach, JoinSettings, NodeFile};
use serde::Serialize;

use crate::daemon_client::DaemonArgs;
use crate::node::RoleArg;
use crate::node::node_files::{NodeFiles, host_name, interface_of, own_address};
use crate::node::{no_daemon_text, sibling_command};
use crate::output::{output, output_line, print_json};
use crate::table::TextTable;

/// Make a group, make the tokens with which hosts join it, or decide for a group that cannot
#[derive(Debug, Args)]
pub struct GroupArgs {
    #[command(subcommand)]
    command: GroupCommand,
}

#[derive(Debug, Subcommand)]
enum GroupCommand {
    Create(Box<CreateArgs>),
    Token(TokenArgs),
    Takeover(contact_takeover::TakeoverArgs),
}

/// Make a new group whose first node is this host: authority, key, certificate and configuration
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  holdfast group create web\n  \
                        holdfast group create web --node n1 --address 10.0.0.11 --interface eth0\n  \
                        holdfast group create web --authority /media/safe/ca --sign-offline\n\n\
                        Whoever has the authority's directory can make nodes of the group: keep a copy in a safe place.")]
struct CreateArgs {
    /// Name of the group
    group: String,
    /// Name of this node [default: the first label of the host's name]
    #[arg(long, value_name = "NAME")]
    node: Option<String>,
    /// Address of this node for the others [default: the only one]
    #[arg(long, value_name = "IP")]
    address: Option<IpAddr>,
    /// Network device on which clients' packets arrive [default: the one with the address]
    #[arg(long, value_name = "DEVICE")]
    interface: Option<String>,
    /// Way in which clients' packets reach the owner of their connection
    #[arg(
        long,
        value_name = "REACH",
        default_value = "steer",
        requires_if("broadcast", "shared_mac")
    )]
    reach: ReachArg,
    /// Link address of the service addresses, with --reach broadcast
    #[arg(long, value_name = "MAC", value_parser = parse_mac)]
    shared_mac: Option<MacAddress>,
    /// Directory of the new authority [default: authority, in --state-dir]
    #[arg(long, value_name = "DIR")]
    authority: Option<PathBuf>,
    /// This node signs no certificates: requests are signed with `holdfast ca sign`
    #[arg(long)]
    sign_offline: bool,
    /// The configuration to write
    #[arg(
        long,
        value_name = "FILE",
        default_value = "/etc/holdfast/holdfast.toml"
    )]
    config: PathBuf,
    /// Directory for key, certificate and state
    #[arg(long, value_name = "DIR", default_value = "/var/lib/holdfast")]
    state_dir: PathBuf,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum ReachArg {
    /// The contact node forwards each connection to its owner.
    Steer,
    /// Every node receives every packet, and accepts its own connections.
    Broadcast,
}

/// A link address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct MacAddress([u8; 6]);

/// Print a token with which one host can join the group within an hour
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  holdfast group token\n  holdfast group token --minutes 10 --json\n  \
                        holdfast group token --role server\n  \
                        holdfast group token --list\n  holdfast group token --revoke 1f0c…\n\n\
                        The first line of the output is the command for the new host, the second one the token for which the \
                        command asks. A token works at the node that made it. Whoever has it can join the group: send it over a \
                        safe way.\n\n\
                        A backup decides with the others about the group, and may become contact node. Give a host that shall \
                        only serve a token with --role server: the certificate for it admits the host to nothing else."
)]
struct TokenArgs {
    #[command(flatten)]
    daemon: DaemonArgs,
    /// Minutes for which the token can be used
    #[arg(long, value_name = "MINUTES", default_value_t = TOKEN_LIFETIME_S / 60,
          value_parser = clap::value_parser!(u64).range(1..=1_440))]
    minutes: u64,
    /// What the host may be at most
    #[arg(long, value_name = "ROLE", default_value = "backup")]
    role: RoleArg,
    /// List the tokens of this node instead, without their secrets
    #[arg(long, conflicts_with_all = ["minutes", "role"])]
    list: bool,
    /// Revoke the token with this number instead
    #[arg(long, value_name = "NUMBER", conflicts_with_all = ["minutes", "role", "list"])]
    revoke: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Result of `group create`, as printed with `--json`.
#[derive(Debug, Serialize)]
struct CreateReport {
    group: String,
    node: String,
    authority: PathBuf,
    certificate: PathBuf,
    config: PathBuf,
}

/// Runs `holdfast group`.
///
/// # Errors
/// A file exists or cannot be written, or the daemon does not answer.
pub fn run(args: &GroupArgs) -> Result<()> {
    match &args.command {
        GroupCommand::Create(args) => create(args),
        GroupCommand::Token(args) => token(args),
        GroupCommand::Takeover(args) => contact_takeover::run(args),
    }
}

fn create(args: &CreateArgs) -> Result<()> {
    let report = make_files(args)?;
    begin_group(&args.config)?;
    match args.json {
        true => print_json(&report),
        false => {
            print_created(&report, args.sign_offline);
            Ok(())
        }
    }
}

/// Lets the daemon's program write the first state of the group.
fn begin_group(config: &Path) -> Result<()> {
    let mut command = sibling_command("holdfastd");
    command.arg("--create-group").arg("--config").arg(config);
    let output = command
        .output()
        .map_err(|error| anyhow!(no_daemon_text("holdfastd", &error)))?;
    let problem = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success(),
        "{}; remove the cause, and run `holdfastd --create-group --config {}`",
        problem.trim(),
        config.display()
    );
    Ok(())
}

/// Makes the authority, and key, certificate and configuration of this node.
fn make_files(args: &CreateArgs) -> Result<CreateReport> {
    let node = match &args.node {
        Some(name) => name.clone(),
        None => host_name()?,
    };
    let files = NodeFiles::new(&args.state_dir, &node)?;
    let address = match args.address {
        Some(address) => address,
        None => own_address(args.interface.as_deref())?,
    };
    let interface = match &args.interface {
        Some(interface) => interface.clone(),
        None => interface_of(address)?,
    };
    ensure!(
        args.reach == ReachArg::Broadcast || args.shared_mac.is_none(),
        "--shared-mac belongs to --reach broadcast; leave it out"
    );
    // All that can be refused is refused before the first file is written.
    ensure!(
        !args.config.exists(),
        "{} exists: this host has a configuration; move the file away, or name another one with --config",
        args.config.display()
    );
    let authority_dir = args.authority.clone();
    let authority_dir = authority_dir.unwrap_or_else(|| args.state_dir.join("authority"));
    let authority = CertificateAuthority::init(&authority_dir, &args.group)?;
    let key = files.key_for_join()?;
    let request = CertificateRequest::from_der(&key.request(&node)?.der)?;
    let signed = authority.sign(&request, RENEWED_DAYS)?;
    files.write("ca.pem", &authority.certificate_pem()?)?;
    files.write("ca.crl", &authority.revocations_pem()?)?;
    files.write_certificate(&signed.pem)?;
    let text = NodeFile {
        name: node.clone(),
        address,
        interface,
        state_dir: files.state_dir_if_unusual(),
        tls_dir: files.dir().to_owned(),
        accepts_hosts: true,
        authority_dir: (!args.sign_offline).then(|| authority_dir.clone()),
        only_serves: false,
        has_revocation_list: true,
        group: JoinSettings {
            name: args.group.clone(),
            reach: match (args.reach, args.shared_mac) {
                (ReachArg::Broadcast, Some(MacAddress(shared_mac))) => {
                    GroupReach::Broadcast { shared_mac }
                }
                _ => GroupReach::Steer,
            },
            contact: None,
            nodes: Vec::new(),
            revocations: None,
        },
    }
    .text();
    files.write_config(&args.config, &text)?;
    Ok(CreateReport {
        group: args.group.clone(),
        node,
        authority: authority_dir,
        certificate: files.certificate(),
        config: args.config.clone(),
    })
}

fn print_created(report: &CreateReport, sign_offline: bool) {
    output_line!("Made group {} with node {}.", report.group, report.node);
    output_line!("  authority      {}", report.authority.display());
    output_line!("  certificate    {}", report.certificate.display());
    output_line!("  configuration  {}", report.config.display());
    let what = if sign_offline {
        "Keep"
    } else {
        "Keep a copy of"
    };
    output_line!("{what} the authority in a safe place: it makes nodes of the group.");
    output_line!("Start the node: systemctl enable --now holdfastd");
    output_line!("Then let other hosts join: holdfast group token");
}

fn token(args: &TokenArgs) -> Result<()> {
    let client = args.daemon.client()?;
    if args.list {
        let list = args.daemon.ask(&client, |client| client.tokens())?;
        match args.json {
            true => print_json(&list)?,
            false => output!("{}", token_table(&list.tokens)),
        }
        return Ok(());
    }
    if let Some(id) = &args.revoke {
        let entry = args.daemon.ask(&client, |client| client.revoke_token(id))?;
        match args.json {
            true => print_json(&entry)?,
            false => output_line!("Revoked token {}.", entry.id),
        }
        return Ok(());
    }
    let request = TokenRequest {
        lifetime_s: Some(args.minutes * 60),
        role: Some(args.role.into()),
    };
    let made = args
        .daemon
        .ask(&client, |client| client.make_token(&request))?;
    match args.json {
        true => print_json(&made)?,
        false => {
            output_line!("{}", join_command(&made));
            output_line!("{}", made.token);
            eprintln!(
                "Run the command as root on the new host within {} minutes, and give it the token when it asks. Token {} serves \
                 one host.",
                args.minutes, made.id
            );
        }
    }
    Ok(())
}

/// Returns the command for the new host, without the token: every user of the host can read the arguments of a command.
fn join_command(made: &NewToken) -> String {
    let address: Option<SocketAddr> = made.address.parse().ok();
    let address = match address {
        Some(address) if address.port() == DEFAULT_ENROLMENT_PORT => address.ip().to_string(),
        _ => made.address.clone(),
    };
    format!("holdfast node join --token - {address}")
}

fn token_table(tokens: &[TokenEntry]) -> String {
    let mut table = TextTable::new(["token", "state", "role", "node", "ends (unix time)"]);
    for token in tokens {
        let state = match token.state {
            TokenState::Fresh => "fresh",
            TokenState::Used => "used",
            TokenState::Expired => "expired",
            TokenState::Revoked => "revoked",
        };
        table.row([
            token.id.clone(),
            state.to_owned(),
            match token.role {
                NodeRole::Backup => "backup",
                NodeRole::Server => "server",
            }
            .to_owned(),
            token.node.clone().unwrap_or_default(),
            token.expires_at_s.to_string(),
        ]);
    }
    table.text()
}

fn parse_mac(text: &str) -> Result<MacAddress> {
    let pairs: Vec<u8> = text
        .split(':')
        .filter(|pair| pair.len() == 2)
        .filter_map(|pair| u8::from_str_radix(pair, 16).ok())
        .collect();
    let mac = <[u8; 6]>::try_from(pairs).ok();
    mac.filter(|_| text.len() == 17)
        .map(MacAddress)
        .ok_or_else(|| {
            anyhow!("`{text}` is not a MAC address; write six pairs, such as 02:00:5e:00:00:01")
        })
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct TestCommandLine {
        #[command(flatten)]
        args: GroupArgs,
    }

    fn group(words: &[&str]) -> Result<()> {
        let line = [&["group"], words].concat();
        run(&TestCommandLine::try_parse_from(line)?.args)
    }

    /// Makes the files of a group, but not the state that the daemon's program writes.
    fn create_in(dir: &Path, more: &[&str]) -> Result<CreateReport> {
        let path = |name: &str| dir.join(name).to_str().expect("a UTF-8 path").to_owned();
        let (config, state) = (path("holdfast.toml"), path("state"));
        let words = ["create", "web", "--node", "n1", "--address", "127.0.0.1"];
        let files = ["--config", &config, "--state-dir", &state];
        let line = [&["group"], &words[..], &files, more].concat();
        match TestCommandLine::try_parse_from(line)?.args.command {
            GroupCommand::Create(args) => make_files(&args),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn created_group_has_authority_certificate_and_configuration() {
        let dir = tempfile::tempdir().unwrap();
        create_in(dir.path(), &[]).unwrap();
        let state = dir.path().join("state");
        for file in [
            "authority/ca.key",
            "tls/n1.key",
            "tls/n1.pem",
            "tls/ca.pem",
            "tls/ca.crl",
        ] {
            assert!(state.join(file).exists(), "{file}");
        }
        assert!(
            !state.join("authority/n1.key").exists(),
            "the key has one place"
        );
        let text = std::fs::read_to_string(dir.path().join("holdfast.toml")).unwrap();
        for line in [
            "[joining]",
            "interface = \"lo\"",
            "role = \"backup\"",
            "seeds = []",
        ] {
            assert!(text.lines().any(|other| other == line), "{line}: {text}");
        }
        let again = create_in(dir.path(), &[]).unwrap_err().to_string();
        assert!(again.contains("has a configuration"), "{again}");
    }

    #[test]
    fn authority_may_stay_away_from_the_node() {
        let dir = tempfile::tempdir().unwrap();
        let authority = dir.path().join("safe");
        let authority = authority.to_str().unwrap();
        let mac = ["--reach", "broadcast", "--shared-mac", "02:00:5e:00:00:01"];
        let more = ["--authority", authority, "--sign-offline"];
        create_in(dir.path(), &[&more[..], &mac].concat()).unwrap();
        let text = std::fs::read_to_string(dir.path().join("holdfast.toml")).unwrap();
        assert!(
            text.contains("[joining]\n") && !text.contains("authority ="),
            "{text}"
        );
        assert!(
            text.contains("shared_mac = \"02:00:5e:00:00:01\""),
            "{text}"
        );
    }

    #[test]
    fn invalid_arguments_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        for words in [
            &["--reach", "broadcast"][..],
            &["--shared-mac", "02:00:5e:00:00:01"],
            &["--shared-mac", "02:00:5e:00:00"],
            &["--shared-mac", "02:00:5e:00:00:1"],
            &["--interface", "lo", "--address", "here"],
        ] {
            assert!(create_in(dir.path(), words).is_err(), "{words:?}");
        }
        assert!(group(&["token", "--list", "--revoke", "00"]).is_err());
        assert!(group(&["token", "--minutes", "0"]).is_err());
        assert!(!dir.path().join("state").exists());
    }

    #[test]
    fn join_command_names_an_unusual_port() {
        let made = |address: &str| NewToken {
            token: "hf1-0".to_owned(),
            id: "00".to_owned(),
            expires_at_s: 1,
            address: address.to_owned(),
        };
        let command = join_command(&made("10.0.0.11:7401"));
        assert_eq!(command, "holdfast node join --token - 10.0.0.11");
        let command = join_command(&made("[fd00::1]:80"));
        assert_eq!(command, "holdfast node join --token - [fd00::1]:80");
    }
}
