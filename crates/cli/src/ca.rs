//! `holdfast ca`: the group's own certificate authority.

use std::net::IpAddr;
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::{Args, Subcommand};
use holdfast_api::ca::{
    CertificateAuthority, CertificateRequest, CertificateTerms, NODE_DAYS, RENEWED_DAYS,
};
use holdfast_api::control::{RevocationRequest, RevocationStatus};

use crate::daemon_client::DaemonArgs;
use crate::node::RoleArg;
use crate::output::{output_line, print_json};

/// The group's own certificate authority: a directory of files on a machine you trust.
#[derive(Debug, Args)]
pub struct CaArgs {
    /// The authority's directory.
    #[arg(long, global = true, value_name = "DIR", default_value = "ca")]
    dir: PathBuf,
    #[command(subcommand)]
    command: CaCommand,
}

#[derive(Debug, Subcommand)]
enum CaCommand {
    /// Make a new authority; an existing one is never overwritten.
    Init {
        /// The group's name, `name` of `[group]` in the configuration.
        #[arg(long, value_name = "NAME")]
        group: String,
    },
    /// Issue certificate and key for a node.
    #[command(
        after_help = "Examples:\n  holdfast ca issue n1 --dir ca\n  holdfast ca issue n7 --role server --days 90"
    )]
    Issue {
        /// The node's name, `name` of `[node]` in the configuration.
        node: String,
        /// An address of the node to add to the certificate (for other tools; nodes know each other by name).
        #[arg(long, value_name = "IP")]
        address: Vec<IpAddr>,
        /// Days of validity.
        #[arg(long, default_value_t = NODE_DAYS, value_parser = clap::value_parser!(u32).range(1..=36_500))]
        days: u32,
        /// What the node may be at most, in a group that runs itself.
        #[arg(long, value_name = "ROLE", default_value = "backup")]
        role: RoleArg,
    },
    /// Sign the request that `holdfast node join` made where the authority is not at hand.
    #[command(
        after_help = "Example:\n  holdfast ca sign n2.csr --dir ca\n\nThe certificate is NODE.pem in the authority's directory. \
                            On the node: holdfast node join --certificate NODE.pem"
    )]
    Sign {
        /// The request, NODE.csr.
        request: PathBuf,
        /// Days of validity.
        #[arg(long, default_value_t = RENEWED_DAYS, value_parser = clap::value_parser!(u32).range(1..=36_500))]
        days: u32,
        /// What the node may be at most, in a group that runs itself.
        #[arg(long, value_name = "ROLE", default_value = "backup")]
        role: RoleArg,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Revoke a node's certificates; its files are moved aside. If a daemon runs here, all nodes of its group refuse the
    /// certificates at once.
    Revoke {
        /// The node's name.
        node: String,
        #[command(flatten)]
        daemon: DaemonArgs,
    },
    /// Put the authority's revocation list in force at all nodes of the group, by the daemon of this host.
    #[command(
        after_help = "Example:\n  holdfast ca publish --dir ca\n  holdfast ca publish --list ca.crl"
    )]
    Publish {
        /// The list, if it is not ca.crl in the authority's directory.
        #[arg(long, value_name = "FILE")]
        list: Option<PathBuf>,
        #[command(flatten)]
        daemon: DaemonArgs,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
}

/// Runs `holdfast ca`.
///
/// # Errors
/// The authority's files are missing, damaged or exist already, or the name is not allowed for a node.
pub fn run(args: CaArgs) -> anyhow::Result<()> {
    let dir = &args.dir;
    match args.command {
        CaCommand::Init { group } => {
            CertificateAuthority::init(dir, &group)?;
            output_line!("Made the authority of group {group} in {}.", dir.display());
            output_line!(
                "Keep ca.key there; give ca.pem and ca.crl to every node ([tls] ca and crl)."
            );
        }
        CaCommand::Issue {
            node,
            address,
            days,
            role,
        } => {
            let terms = terms(days, role);
            let issued = CertificateAuthority::open(dir)?.issue(&node, &address, terms)?;
            output_line!("Issued serial {} for {node}:", issued.serial);
            output_line!("  certificate  {}", issued.cert.display());
            output_line!("  private key  {}", issued.key.display());
            output_line!("Move both to the node ([tls] cert and key).");
        }
        CaCommand::Sign {
            request,
            days,
            role,
            json,
        } => sign(dir, &request, terms(days, role), json)?,
        CaCommand::Revoke { node, daemon } => {
            for serial in CertificateAuthority::open(dir)?.revoke(&node)? {
                output_line!("Revoked serial {serial} of {node}.");
            }
            let list = dir.join("ca.crl");
            match publish(&daemon, &list) {
                Ok(_) => output_line!(
                    "The daemon of this host has the new list, and passes it on to all nodes."
                ),
                Err(error) => {
                    output_line!("No daemon took the new list: {error:#}");
                    output_line!(
                        "On any node of the group: holdfast ca publish --list {}",
                        list.display()
                    );
                }
            }
        }
        CaCommand::Publish { list, daemon, json } => {
            let list = list.unwrap_or_else(|| dir.join("ca.crl"));
            let status = publish(&daemon, &list)?;
            match json {
                true => print_json(&status)?,
                false => {
                    for list in &status.lists {
                        output_line!(
                            "In force: list {} of authority {}, with {} revoked certificates.",
                            list.number,
                            list.authority,
                            list.revoked
                        );
                    }
                }
            }
        }
    }
    Ok(())
}

/// Gives the daemon of this host a revocation list.
fn publish(daemon: &DaemonArgs, list: &Path) -> anyhow::Result<RevocationStatus> {
    let list = std::fs::read_to_string(list).with_context(|| list.display().to_string())?;
    let client = daemon.client()?;
    let request = RevocationRequest { list };
    daemon.ask(&client, |client| client.publish_revocations(&request))
}

fn terms(days: u32, role: RoleArg) -> CertificateTerms {
    CertificateTerms {
        days,
        role: Some(role.into()),
    }
}

fn sign(dir: &Path, request: &Path, terms: CertificateTerms, json: bool) -> anyhow::Result<()> {
    let pem = std::fs::read_to_string(request).with_context(|| request.display().to_string())?;
    let request = CertificateRequest::from_pem(&pem)?;
    let node = request.name();
    let authority = CertificateAuthority::open(dir)?;
    authority.check_free(node)?;
    let certificate = dir.join(format!("{node}.pem"));
    anyhow::ensure!(
        !certificate.exists(),
        "{} exists already and is not overwritten; move it away",
        certificate.display()
    );
    let signed = authority.sign(&request, terms)?;
    std::fs::write(&certificate, &signed.pem).with_context(|| certificate.display().to_string())?;
    if json {
        let path = certificate.display().to_string();
        return print_json(
            &serde_json::json!({"node": node, "serial": signed.serial, "certificate": path}),
        );
    }
    output_line!("Signed serial {} for {node}:", signed.serial);
    output_line!("  certificate  {}", certificate.display());
    output_line!(
        "Bring it to the node, and there: holdfast node join --name {node} --certificate {node}.pem"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct TestCommandLine {
        #[command(flatten)]
        args: CaArgs,
    }

    fn ca(dir: &str, words: &[&str]) -> anyhow::Result<()> {
        let line = [&["ca"], words, &["--dir", dir]].concat();
        run(TestCommandLine::try_parse_from(line)?.args)
    }

    #[test]
    fn init_issue_and_revoke_work_in_sequence() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ca");
        let ca = |words: &[&str]| ca(path.to_str().unwrap(), words);
        assert!(ca(&["issue", "n1"]).is_err(), "no authority yet");
        ca(&["init", "--group", "files"]).unwrap();
        assert!(ca(&["init", "--group", "files"]).is_err(), "overwritten");
        ca(&[
            "issue",
            "n1",
            "--address",
            "10.0.0.1",
            "--address",
            "fd00::1",
            "--days",
            "30",
        ])
        .unwrap();
        assert!(path.join("n1.pem").exists() && path.join("n1.key").exists());
        assert!(ca(&["issue", "n1"]).is_err(), "overwritten");
        let no_daemon = ["--socket", "/nonexistent/control.sock"];
        let revoke = [&["revoke", "n1"], &no_daemon[..]].concat();
        ca(&revoke).unwrap();
        assert!(!path.join("n1.pem").exists());
        assert!(ca(&revoke).is_err(), "revoked twice");
        let publish = [&["publish"], &no_daemon[..]].concat();
        let error = ca(&publish).unwrap_err().to_string();
        assert!(error.contains("no daemon runs here"), "{error}");
        for words in [
            &["issue", "n1", "--address", "here"][..],
            &["issue", "n1", "--days", "0"],
            &["issue", "../n1"],
            &["init"],
        ] {
            assert!(ca(words).is_err(), "{words:?}");
        }
    }

    #[test]
    fn request_is_signed_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ca");
        let ca = |words: &[&str]| ca(path.to_str().unwrap(), words);
        ca(&["init", "--group", "files"]).unwrap();
        let request = dir.path().join("n2.csr");
        let pem = holdfast_api::ca::NodeKey::generate()
            .unwrap()
            .request("n2")
            .unwrap()
            .pem;
        std::fs::write(&request, pem).unwrap();
        let request = request.to_str().unwrap();
        ca(&["sign", request]).unwrap();
        assert!(path.join("n2.pem").exists() && !path.join("n2.key").exists());
        assert!(ca(&["sign", request]).is_err(), "n2 has a certificate");
        std::fs::write(request, "text").unwrap();
        assert!(ca(&["sign", request]).is_err());
    }
}
