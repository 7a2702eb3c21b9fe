//! `holdfast node join`: this host gets a key, a certificate and a configuration.

use std::fs::File;
use std::io::{BufRead, BufReader, IsTerminal};
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use clap::Args;
use holdfast_api::ca::{NodeRole, certificate_to_pem, revocation_list_to_pem};
use holdfast_api::enrolment::{
    DEFAULT_ENROLMENT_PORT, EnrolmentAnswer, JoinSettings, JoinToken, NodeFile,
    certificate_matches, certified_role, enrol, first_certificate,
};
use serde::Serialize;

use super::RoleArg;
use super::node_files::{NodeFiles, host_name, interface_of};
use crate::output::{output_line, print_json};

/// Time limit of the exchange with the node.
const EXCHANGE_LIMIT: Duration = Duration::from_secs(10);

/// Maximum number of bytes that are read of a line with a token.
const TOKEN_LINE_BYTES_MAX: u64 = 1_024;

/// Make this host a node of a group, with a token that `holdfast group token` printed
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  holdfast node join --token - 10.0.0.11\n  \
                        holdfast node join --token-file token --name n2 --interface eth1 --role server 10.0.0.11:7401\n  \
                        holdfast node join --certificate n2.pem\n\n\
                        With `--token -` the command reads the token from standard input, and asks for it on a terminal. While a \
                        command runs, every user of the host can read its arguments: do not write the token itself there.\n\n\
                        The key of this node is made here and never leaves the host. If the command is interrupted, run it \
                        again with the same token: it uses the same key.")]
pub struct JoinArgs {
    /// Address of a node that accepts new hosts, and its port if that is another one than usual
    #[arg(value_name = "ADDRESS", required_unless_present = "certificate")]
    address: Option<String>,
    /// The token, or - to read the token from standard input
    #[arg(long, value_name = "TOKEN", required_unless_present_any = ["certificate", "token_file"])]
    token: Option<String>,
    /// File whose first line is the token
    #[arg(long, value_name = "FILE", conflicts_with = "token")]
    token_file: Option<PathBuf>,
    /// Name of this node [default: the first label of the host's name]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Network device on which clients' packets arrive [default: the one that leads to ADDRESS]
    #[arg(long, value_name = "DEVICE")]
    interface: Option<String>,
    /// Whether this node may become contact node [default: what the token admits to]
    #[arg(long, value_name = "ROLE")]
    role: Option<RoleArg>,
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
    /// Complete a join whose request was signed with `holdfast ca sign`: the signed certificate
    #[arg(long, value_name = "FILE", conflicts_with_all = ["address", "token", "token_file", "interface"])]
    certificate: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Result of a join, as printed with `--json`.
#[derive(Debug, Serialize)]
struct JoinReport {
    node: String,
    group: Option<String>,
    config: PathBuf,
    certificate: Option<PathBuf>,
    /// File to sign with `holdfast ca sign`, if the node that was asked has no authority.
    request: Option<PathBuf>,
    /// Number to give this node in the files of the other nodes, if files configure the group.
    node_id: Option<u16>,
}

/// Runs `holdfast node join`.
///
/// # Errors
/// The node refuses or cannot be reached, or a file exists or cannot be written.
pub fn run(args: &JoinArgs) -> Result<()> {
    let name = match &args.name {
        Some(name) => name.clone(),
        None => host_name()?,
    };
    let files = NodeFiles::new(&args.state_dir, &name)?;
    let report = match &args.certificate {
        Some(path) => complete(args, &files, path)?,
        None => join(args, &files)?,
    };
    match args.json {
        true => print_json(&report),
        false => {
            print_report(&report);
            Ok(())
        }
    }
}

fn join(args: &JoinArgs, files: &NodeFiles) -> Result<JoinReport> {
    let token = read_token(args)?;
    let address = parse_address(args.address.as_deref().unwrap_or_default())?;
    ensure!(
        !args.config.exists(),
        "{} exists: this host has a configuration; move the file away, or name another one with --config",
        args.config.display()
    );
    let key = files.key_for_join()?;
    let request = key.request(files.name())?;
    let enrolled = enrol(address, &token, &request.der, EXCHANGE_LIMIT)?;
    files.write("ca.pem", &certificate_to_pem(&enrolled.authority))?;
    let (certificate, group) = match enrolled.answer {
        EnrolmentAnswer::Signed { certificate, group } => (Some(certificate), group),
        EnrolmentAnswer::SignOffline { group } => (None, group),
        EnrolmentAnswer::Refused { reason } => bail!("{reason}"),
    };
    write_revocations(files, &group)?;
    if let Some(certificate) = &certificate {
        certificate_matches(
            certificate,
            &enrolled.authority,
            files.name(),
            &key.to_pem(),
        )?;
        check_role(args.role, certificate)?;
        files.write_certificate(&certificate_to_pem(certificate))?;
    } else {
        files.write(&format!("{}.csr", files.name()), &request.pem)?;
    }
    let role = args.role.map(NodeRole::from);
    let role = role.or_else(|| certified_role(certificate.as_deref()?));
    let only_serves = role == Some(NodeRole::Server);
    let node_file = node_file(args, files, *group, (enrolled.local_address, only_serves))?;
    files.write_config(&args.config, &node_file.text())?;
    Ok(JoinReport {
        node: files.name().to_owned(),
        group: Some(node_file.group.name.clone()),
        config: args.config.clone(),
        certificate: certificate.is_some().then(|| files.certificate()),
        request: certificate.is_none().then(|| files.request()),
        node_id: node_file.configured_id(),
    })
}

/// Refuses a certificate that does not admit this node to the role that the operator wants.
fn check_role(wanted: Option<RoleArg>, certificate: &[u8]) -> Result<()> {
    let is_admitted =
        wanted != Some(RoleArg::Backup) || certified_role(certificate) != Some(NodeRole::Server);
    ensure!(
        is_admitted,
        "the token admits this host as a server node only; repeat the command with --role server, or with a token that \
         `holdfast group token --role backup` printed"
    );
    Ok(())
}

/// Returns the token, from standard input, a file or the command line.
fn read_token(args: &JoinArgs) -> Result<JoinToken> {
    let line = match (&args.token_file, args.token.as_deref()) {
        (Some(path), _) => {
            let file = File::open(path).with_context(|| path.display().to_string())?;
            read_line(BufReader::new(file)).with_context(|| path.display().to_string())?
        }
        (None, Some("-")) => {
            let input = std::io::stdin();
            if input.is_terminal() {
                eprint!("Token: ");
            }
            read_line(input.lock()).context("standard input")?
        }
        (None, token) => {
            eprintln!(
                "warning: every user of this host can read a token on the command line; `--token -` reads it from standard input"
            );
            token.unwrap_or_default().to_owned()
        }
    };
    Ok(line.parse()?)
}

/// Reads one line, which may have no end.
fn read_line(input: impl BufRead) -> std::io::Result<String> {
    let mut line = String::new();
    input.take(TOKEN_LINE_BYTES_MAX).read_line(&mut line)?;
    Ok(line)
}

/// Writes the revocation list, if the group has one.
fn write_revocations(files: &NodeFiles, group: &JoinSettings) -> Result<()> {
    match &group.revocations {
        Some(list) => files.write("ca.crl", &revocation_list_to_pem(list)),
        None => Ok(()),
    }
}

fn node_file(
    args: &JoinArgs,
    files: &NodeFiles,
    group: JoinSettings,
    (local_address, only_serves): (IpAddr, bool),
) -> Result<NodeFile> {
    let interface = match &args.interface {
        Some(interface) => interface.clone(),
        None => interface_of(local_address)?,
    };
    Ok(NodeFile {
        name: files.name().to_owned(),
        address: local_address,
        interface,
        state_dir: files.state_dir_if_unusual(),
        tls_dir: files.dir().to_owned(),
        accepts_hosts: false,
        authority_dir: None,
        only_serves,
        has_revocation_list: group.revocations.is_some(),
        group,
    })
}

/// Completes a join with a certificate that was signed elsewhere.
fn complete(args: &JoinArgs, files: &NodeFiles, path: &PathBuf) -> Result<JoinReport> {
    let pem = std::fs::read_to_string(path).with_context(|| format!("{}", path.display()))?;
    let certificate = first_certificate(pem.as_bytes())
        .ok_or_else(|| anyhow!("{}: not a certificate in PEM", path.display()))?;
    let authority = first_certificate(files.read("ca.pem")?.as_bytes())
        .ok_or_else(|| anyhow!("ca.pem: not a certificate in PEM; join again with a new token"))?;
    let key = files.read(&format!("{}.key", files.name()))?;
    certificate_matches(&certificate, &authority, files.name(), &key)?;
    files.write_certificate(&certificate_to_pem(&certificate))?;
    Ok(JoinReport {
        node: files.name().to_owned(),
        group: None,
        config: args.config.clone(),
        certificate: Some(files.certificate()),
        request: None,
        node_id: None,
    })
}

fn print_report(report: &JoinReport) {
    let node = &report.node;
    match &report.group {
        Some(group) => output_line!("{node} is admitted to group {group}."),
        None => output_line!("{node} has its certificate."),
    }
    if let Some(certificate) = &report.certificate {
        output_line!("  certificate    {}", certificate.display());
    }
    output_line!("  configuration  {}", report.config.display());
    if let Some(request) = &report.request {
        output_line!(
            "The node has no authority. Where the authority is, sign the request:\n  holdfast ca sign {}\n\
             Bring the certificate here, and complete the join:\n  holdfast node join --name {node} --certificate {node}.pem",
            request.display()
        );
        return;
    }
    if let Some(id) = report.node_id {
        output_line!(
            "Files configure this group: add a [[peer]] with name = \"{node}\", id = {id} and this host's address to the \
             files of all other nodes, and restart their daemons."
        );
    }
    output_line!("Start the node: systemctl enable --now holdfastd");
}

/// Reads `ADDRESS[:PORT]`, where ADDRESS may be a name.
fn parse_address(text: &str) -> Result<SocketAddr> {
    if let Ok(ip) = text.parse::<IpAddr>() {
        return Ok(SocketAddr::new(ip, DEFAULT_ENROLMENT_PORT));
    }
    let has_port = text
        .rsplit_once(':')
        .is_some_and(|(host, _)| !host.is_empty());
    let found = match has_port {
        true => text.to_socket_addrs(),
        false => (text, DEFAULT_ENROLMENT_PORT).to_socket_addrs(),
    };
    let found = found.with_context(|| format!("`{text}` is not an address: write ADDRESS[:PORT]"));
    found?
        .next()
        .ok_or_else(|| anyhow!("`{text}` has no address"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, clap::Parser)]
    struct TestCommandLine {
        #[command(flatten)]
        args: JoinArgs,
    }

    fn parse(words: &[&str]) -> Result<JoinArgs> {
        use clap::Parser;
        let line = [&["join"], words].concat();
        Ok(TestCommandLine::try_parse_from(line)?.args)
    }

    #[test]
    fn token_is_read_from_a_file_or_an_argument() {
        let authority = holdfast_api::enrolment::AuthorityId([1; 16]);
        let token = JoinToken::with_secret(authority, [2; 16]);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        let file = path.to_str().unwrap();
        for text in [format!("{token}\n# of n1\n"), token.to_string()] {
            std::fs::write(&path, text).unwrap();
            let args = parse(&["--token-file", file, "10.0.0.1"]).unwrap();
            assert_eq!(read_token(&args).unwrap(), token);
        }
        let args = parse(&["--token", &token.to_string(), "10.0.0.1"]).unwrap();
        assert_eq!(read_token(&args).unwrap(), token);
        // An endless file ends.
        let args = parse(&["--token-file", "/dev/zero", "10.0.0.1"]).unwrap();
        assert!(read_token(&args).is_err());
        let args = parse(&["--token-file", "/nonexistent", "10.0.0.1"]).unwrap();
        let error = read_token(&args).unwrap_err().to_string();
        assert!(error.contains("/nonexistent"), "{error}");
        let dash = parse(&["--token", "-", "10.0.0.1"]).unwrap();
        assert_eq!(dash.token.as_deref(), Some("-"));
        for words in [
            &["10.0.0.1"][..],
            &["--token", "-"],
            &["--token", "-", "--token-file", file, "10.0.0.1"],
            &["--token-file", file, "--certificate", "n2.pem"],
        ] {
            assert!(parse(words).is_err(), "{words:?}");
        }
    }

    #[test]
    fn token_is_the_first_line_of_the_input() {
        for (input, expected) in [("hf1-0\nhf1-1\n", "hf1-0\n"), ("hf1-0", "hf1-0"), ("", "")] {
            assert_eq!(read_line(input.as_bytes()).unwrap(), expected);
        }
    }

    #[test]
    fn address_has_the_default_port() {
        for (text, expected) in [
            ("10.0.0.1", "10.0.0.1:7401"),
            ("10.0.0.1:80", "10.0.0.1:80"),
            ("fd00::1", "[fd00::1]:7401"),
            ("[fd00::1]:80", "[fd00::1]:80"),
        ] {
            assert_eq!(parse_address(text).unwrap().to_string(), expected);
        }
        for text in ["", ":80", "10.0.0.1:x", "no host"] {
            assert!(parse_address(text).is_err(), "{text}");
        }
    }
}
