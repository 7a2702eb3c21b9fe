//! `holdfast ca`: the group's own certificate authority.

use std::net::IpAddr;
use std::path::PathBuf;

use crate::output::output_line;
use clap::{Args, Subcommand};
use holdfast_api::ca::{CertificateAuthority, NODE_DAYS};

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
    Issue {
        /// The node's name, `name` of `[node]` in the configuration.
        node: String,
        /// An address of the node to add to the certificate (for other tools; nodes know each other by name).
        #[arg(long, value_name = "IP")]
        address: Vec<IpAddr>,
        /// Days of validity.
        #[arg(long, default_value_t = NODE_DAYS, value_parser = clap::value_parser!(u32).range(1..=36_500))]
        days: u32,
    },
    /// Revoke a node's certificates; its files are moved aside.
    Revoke {
        /// The node's name.
        node: String,
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
        } => {
            let issued = CertificateAuthority::open(dir)?.issue(&node, &address, days)?;
            output_line!("Issued serial {} for {node}:", issued.serial);
            output_line!("  certificate  {}", issued.cert.display());
            output_line!("  private key  {}", issued.key.display());
            output_line!("Move both to the node ([tls] cert and key).");
        }
        CaCommand::Revoke { node } => {
            for serial in CertificateAuthority::open(dir)?.revoke(&node)? {
                output_line!("Revoked serial {serial} of {node}.");
            }
            let list = dir.join("ca.crl");
            output_line!(
                "Give {} to every node ([tls] crl), and send SIGHUP to its holdfastd.",
                list.display()
            );
        }
    }
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
        ca(&["revoke", "n1"]).unwrap();
        assert!(!path.join("n1.pem").exists());
        assert!(ca(&["revoke", "n1"]).is_err(), "revoked twice");
        for words in [
            &["issue", "n1", "--address", "here"][..],
            &["issue", "n1", "--days", "0"],
            &["issue", "../n1"],
            &["init"],
        ] {
            assert!(ca(words).is_err(), "{words:?}");
        }
    }
}
