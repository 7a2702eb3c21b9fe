//! TLS between nodes, and between registrars, elements and users: version 1.3 only, certificates on both sides, checked against
//! the group's authority.
//!
//! A node's identity is the DNS name `NAME.node` in its certificate (`holdfast_api::ca`). The dialling side lets TLS
//! check it; the accepting side reads it with [`node_name`] once the greeting says who claims to be there.
//!
//! Sessions are never resumed: a resumed session skips the certificate, and with it the revocation list.

mod member;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use holdfast_api::ca::node_dns_name;
use rustls::client::{Resumption, WebPkiServerVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{
    CertificateDer, CertificateRevocationListDer, PrivateKeyDer, ServerName, UnixTime, pem,
};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use rustls::{
    ClientConfig, ClientConnection, RootCertStore, ServerConfig, ServerConnection, version::TLS13,
};

use crate::config::{Config, TlsConfig};
use member::AnyMember;

/// Why certificates cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read, or holds no such thing.
    #[error("{}: {source}; make it with `holdfast ca`, or correct [tls]", .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: pem::Error,
    },
    /// A file holds nothing of what it is for.
    #[error("{}: holds no {what}; make it with `holdfast ca`, or correct [tls]", .path.display())]
    Empty {
        /// The file.
        path: PathBuf,
        /// What it should hold.
        what: &'static str,
    },
    /// The certificate is nobody's of a group.
    #[error("{}: has no name that `holdfast ca issue` gives; issue one", .0.display())]
    Nameless(PathBuf),
    /// The certificate is another node's.
    #[error("{}: is the certificate of {theirs}, not of node `{ours}`; issue one for it", .path.display())]
    OtherName {
        /// The certificate's file.
        path: PathBuf,
        /// This node's name.
        ours: String,
        /// Whose certificate it is, in words.
        theirs: String,
    },
    /// The files do not fit each other.
    #[error("the files in [tls] do not fit each other: {0}; issue certificate and key anew")]
    Unfit(String),
}

/// Everything needed to open and accept connections between nodes.
#[derive(Clone)]
pub struct Tls {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
    verifier: Arc<dyn ClientCertVerifier>,
}

impl Tls {
    /// Reads the files that `config` names.
    ///
    /// # Errors
    /// As [`Tls::from_files`].
    pub fn load(config: &Config) -> Result<Tls, TlsError> {
        Tls::from_files(&config.tls, &config.node.name)
    }

    /// Reads the files of `config` for the node `name`.
    ///
    /// # Errors
    /// A file is missing or damaged, the certificate is another node's, or the files do not fit each other.
    pub fn from_files(config: &TlsConfig, name: &str) -> Result<Tls, TlsError> {
        let chain = certificates(&config.cert)?;
        let theirs = chain.first().and_then(node_name);
        if theirs.as_deref() != Some(name) {
            return Err(TlsError::OtherName {
                path: config.cert.clone(),
                ours: name.to_owned(),
                theirs: theirs.map_or("no node".to_owned(), |name| format!("node `{name}`")),
            });
        }
        build(config, chain, false)
    }

    /// Reads the files of `config` for whoever's they are, to speak with any member of the group: ask
    /// [`Security::name`](holdfast_sys::transport::Security::name) whom.
    ///
    /// # Errors
    /// A file is missing or damaged, the certificate has no name, or the files do not fit each other.
    pub fn of_member(config: &TlsConfig) -> Result<Tls, TlsError> {
        let chain = certificates(&config.cert)?;
        match chain.first().and_then(node_name) {
            Some(_) => build(config, chain, true),
            None => Err(TlsError::Nameless(config.cert.clone())),
        }
    }

    /// A connection to the node called `name`.
    ///
    /// # Errors
    /// `name` cannot be in a certificate.
    pub fn dial(&self, name: &str) -> Result<ClientConnection, rustls::Error> {
        let name = ServerName::try_from(node_dns_name(name))
            .map_err(|error| rustls::Error::General(error.to_string()))?;
        ClientConnection::new(self.client.clone(), name)
    }

    /// A connection from some node.
    ///
    /// # Errors
    /// None that a configuration made by [`Tls::load`] could cause.
    pub fn accept(&self) -> Result<ServerConnection, rustls::Error> {
        ServerConnection::new(self.server.clone())
    }

    /// Whether a peer with this chain would be admitted at this moment: used on living connections when the revocation
    /// list has changed.
    ///
    /// # Errors
    /// Why not.
    pub fn admits(&self, chain: &[CertificateDer<'_>]) -> Result<(), rustls::Error> {
        let (first, rest) = chain
            .split_first()
            .ok_or(rustls::Error::NoCertificatesPresented)?;
        self.verifier
            .verify_client_cert(first, rest, UnixTime::now())
            .map(|_| ())
    }
}

/// The name of the node whose certificate this is.
pub fn node_name(certificate: &CertificateDer<'_>) -> Option<String> {
    let certificate = webpki::EndEntityCert::try_from(certificate).ok()?;
    let suffix = node_dns_name("");
    certificate
        .valid_dns_names()
        .find_map(|name| name.strip_suffix(&suffix).map(str::to_owned))
}

/// `any`: the other side of a connection that is made here may be any member of the group.
fn build(
    config: &TlsConfig,
    chain: Vec<CertificateDer<'static>>,
    any: bool,
) -> Result<Tls, TlsError> {
    let key = PrivateKeyDer::from_pem_file(&config.key).map_err(file_error(&config.key))?;
    let mut roots = RootCertStore::empty();
    for authority in certificates(&config.ca)? {
        roots.add(authority).map_err(unfit)?;
    }
    let roots = Arc::new(roots);
    let crls = config.crl.as_deref().map_or(Ok(Vec::new()), revocations)?;
    let provider: Arc<CryptoProvider> = Arc::new(rustls::crypto::ring::default_provider());
    let verifier = WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone())
        .with_crls(crls.clone())
        .build()
        .map_err(unfit)?;
    let server_verifier = WebPkiServerVerifier::builder_with_provider(roots, provider.clone())
        .with_crls(crls)
        .build()
        .map_err(unfit)?;
    let client = ClientConfig::builder_with_provider(provider.clone())
        .with_protocol_versions(&[&TLS13])
        .map_err(unfit)?;
    let client = match any {
        true => client
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(AnyMember(server_verifier))),
        false => client.with_webpki_verifier(server_verifier),
    };
    let mut client = client
        .with_client_auth_cert(chain.clone(), key.clone_key())
        .map_err(unfit)?;
    client.resumption = Resumption::disabled();
    client.enable_sni = !any;
    let mut server = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13])
        .map_err(unfit)?
        .with_client_cert_verifier(verifier.clone())
        .with_single_cert(chain, key)
        .map_err(unfit)?;
    server.send_tls13_tickets = 0;
    Ok(Tls {
        client: Arc::new(client),
        server: Arc::new(server),
        verifier,
    })
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    entries(path, "certificate")
}

/// A file without any would revoke nothing, unnoticed.
fn revocations(path: &Path) -> Result<Vec<CertificateRevocationListDer<'static>>, TlsError> {
    entries(path, "revocation list")
}

fn entries<T: PemObject>(path: &Path, what: &'static str) -> Result<Vec<T>, TlsError> {
    let found: Vec<T> = T::pem_file_iter(path)
        .map_err(file_error(path))?
        .collect::<Result<_, _>>()
        .map_err(file_error(path))?;
    match found.is_empty() {
        true => Err(TlsError::Empty {
            path: path.to_owned(),
            what,
        }),
        false => Ok(found),
    }
}

fn file_error(path: &Path) -> impl Fn(pem::Error) -> TlsError {
    let path = path.to_owned();
    move |source| TlsError::File {
        path: path.clone(),
        source,
    }
}

fn unfit(error: impl std::fmt::Display) -> TlsError {
    TlsError::Unfit(error.to_string())
}
