//! TLS between nodes, and between registrars, elements and users: version 1.3 only, with certificates on both sides,
//! checked against the group's authority.
//!
//! A node's identity is the DNS name `NAME.node` in its certificate (`holdfast_api::ca`). On the dialling side TLS
//! checks the name; the accepting side reads it with [`node_name`] after the greeting has named the node.
//!
//! Sessions are never resumed, because a resumed session skips the certificate, and with it the revocation list.

mod any_member_verifier;
mod enrolment;
mod revocation_lists;

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use holdfast_api::ca::{NodeRole, node_dns_name};
use holdfast_api::enrolment::certified_role;
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
use x509_parser::certificate::X509Certificate;

use crate::config::TlsConfig;
use any_member_verifier::AnyMemberVerifier;

pub use enrolment::enrolment_server_config;
pub use revocation_lists::{RevocationError, RevocationLists, SignedList};

/// Mode bits with which every user has access to a file.
const ACCESS_BY_ALL: u32 = 0o007;

/// Reason why certificates cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read, or is not valid PEM.
    #[error("{}: {source}; make it with `holdfast ca`, or correct [tls]", .path.display())]
    File {
        /// File that cannot be read, or is not valid PEM.
        path: PathBuf,
        /// Error of the reader.
        source: pem::Error,
    },
    /// A file lacks the expected content.
    #[error("{}: contains no {content}; make it with `holdfast ca`, or correct [tls]", .path.display())]
    Empty {
        /// File that lacks the expected content.
        path: PathBuf,
        /// The expected content.
        content: &'static str,
    },
    /// A certificate does not follow X.509.
    #[error("{}: not a certificate: {problem}; issue a new one", .path.display())]
    Malformed {
        /// File of the malformed certificate.
        path: PathBuf,
        /// Description of the problem.
        problem: String,
    },
    /// The certificate has no name of a group's member.
    #[error("{}: has no name that `holdfast ca issue` gives; issue a new certificate", .0.display())]
    NoMemberName(PathBuf),
    /// The certificate belongs to another node.
    #[error("{}: is the certificate of {theirs}, not of node `{ours}`; issue one for it", .path.display())]
    OtherName {
        /// The certificate's file.
        path: PathBuf,
        /// Name of this node.
        ours: String,
        /// Owner of the certificate, in words.
        theirs: String,
    },
    /// Other members refuse the certificate at this time.
    #[error("{}: other members refuse this certificate: {problem}; issue a new one, or correct the clock", .path.display())]
    Refused {
        /// The certificate's file.
        path: PathBuf,
        /// Reason of the refusal.
        problem: rustls::Error,
    },
    /// Users other than the owner and its group can read the key.
    #[error("{}: every user can read this key; `chmod 600` the file", .0.display())]
    ExposedKey(PathBuf),
    /// A revocation list cannot be put in force.
    #[error("{}: {problem}", .path.display())]
    RevocationList {
        /// File of the revocation list.
        path: PathBuf,
        /// Reason why the revocation list cannot be put in force.
        problem: RevocationError,
    },
    /// The files do not fit each other.
    #[error("the files in [tls] do not match: {0}; issue certificate and key anew")]
    Mismatch(String),
}

impl TlsError {
    /// Returns true if no [`Tls`] can be made from the files. Otherwise the member runs, but should not remain so.
    pub fn is_fatal(&self) -> bool {
        !matches!(self, TlsError::Refused { .. } | TlsError::ExposedKey(_))
    }
}

/// TLS configuration for opening and accepting connections.
#[derive(Clone)]
pub struct Tls {
    client: Arc<ClientConfig>,
    any_member_client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
    verifier: Arc<dyn ClientCertVerifier>,
    own_validity: (SystemTime, SystemTime),
    end: SystemTime,
}

/// Revocation lists as a verifier takes them.
struct Revocations {
    lists: Vec<CertificateRevocationListDer<'static>>,
    /// True if a certificate whose authority has no list is accepted.
    allows_unlisted: bool,
}

impl Tls {
    /// Reads the files of `config` for the node `name`.
    ///
    /// # Errors
    /// A file is missing or damaged, the certificate belongs to another node, or the files do not fit each other.
    pub fn from_files(config: &TlsConfig, name: &str) -> Result<Tls, TlsError> {
        let chain = read_owned_chain(config, Some(name))?;
        build(config, chain, read_configured_revocations(config)?, false)
    }

    /// Does the same as [`Tls::from_files`] with these revocation lists instead of those of `[tls] crl`.
    ///
    /// # Errors
    /// As [`Tls::from_files`].
    pub fn with_lists(
        config: &TlsConfig,
        name: &str,
        lists: &RevocationLists,
    ) -> Result<Tls, TlsError> {
        let revocations = Revocations {
            lists: lists.for_verifier(),
            allows_unlisted: !lists.are_complete(),
        };
        build(
            config,
            read_owned_chain(config, Some(name))?,
            revocations,
            false,
        )
    }

    /// Reads the files of `config` for any owner, to communicate with any member of the group.
    /// [`node_name`] returns the member's name.
    ///
    /// # Errors
    /// A file is missing or damaged, the certificate has no name, or the files do not fit each other.
    pub fn for_any_member(config: &TlsConfig) -> Result<Tls, TlsError> {
        let chain = read_owned_chain(config, None)?;
        build(config, chain, read_configured_revocations(config)?, true)
    }

    /// Returns the time at which the other members' trust ends: at the end of this member's certificates, or of the last
    /// authority, whichever is earlier.
    pub fn end(&self) -> SystemTime {
        self.end
    }

    /// Returns begin and end of the validity of this member's own certificate.
    pub fn own_validity(&self) -> (SystemTime, SystemTime) {
        self.own_validity
    }

    /// Returns a connection to the node called `name`.
    ///
    /// # Errors
    /// `name` cannot be in a certificate.
    pub fn dial(&self, name: &str) -> Result<ClientConnection, rustls::Error> {
        let name = ServerName::try_from(node_dns_name(name))
            .map_err(|error| rustls::Error::General(error.to_string()))?;
        ClientConnection::new(self.client.clone(), name)
    }

    /// Returns a connection to a node whose name is not known: any member of the group may answer. [`node_name`] returns
    /// the member's name.
    ///
    /// # Errors
    /// None that a configuration made by [`Tls::from_files`] could cause.
    pub fn dial_any_member(&self) -> Result<ClientConnection, rustls::Error> {
        // The verifier uses the name in the certificate, and no name is sent.
        let name = ServerName::from(std::net::IpAddr::from([0, 0, 0, 0]));
        ClientConnection::new(self.any_member_client.clone(), name)
    }

    /// Returns a connection from any node.
    ///
    /// # Errors
    /// None that a configuration made by [`Tls::from_files`] could cause.
    pub fn accept(&self) -> Result<ServerConnection, rustls::Error> {
        ServerConnection::new(self.server.clone())
    }

    /// Checks that a peer with this chain would be admitted at this moment. Used on existing connections after the
    /// revocation list has changed.
    ///
    /// # Errors
    /// The reason for the refusal.
    pub fn admits(&self, chain: &[CertificateDer<'_>]) -> Result<(), rustls::Error> {
        let (first, rest) = chain
            .split_first()
            .ok_or(rustls::Error::NoCertificatesPresented)?;
        self.verifier
            .verify_client_cert(first, rest, UnixTime::now())
            .map(|_| ())
    }
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, text: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        text.write_str("Tls")
    }
}

/// Returns the name of the node in a certificate.
pub fn node_name(certificate: &CertificateDer<'_>) -> Option<String> {
    let certificate = webpki::EndEntityCert::try_from(certificate).ok()?;
    let suffix = node_dns_name("");
    certificate
        .valid_dns_names()
        .find_map(|name| name.strip_suffix(&suffix).map(str::to_owned))
}

/// The parts of a certificate that decide about its renewal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertificateContent {
    /// The serial number, big endian.
    pub serial: Vec<u8>,
    /// The public key: for a key on P-256, the uncompressed point (SEC 1, section 2.3.3).
    pub public_key: Vec<u8>,
    /// Begin of the validity.
    pub begin: SystemTime,
    /// End of the validity.
    pub end: SystemTime,
    /// The role that the certificate names.
    pub role: Option<NodeRole>,
}

/// Reads a certificate. Returns nothing if the bytes are none.
pub fn read_content(certificate: &CertificateDer<'_>) -> Option<CertificateContent> {
    let (_, parsed) = x509_parser::parse_x509_certificate(certificate).ok()?;
    let (begin, end) = validity_of(&parsed);
    Some(CertificateContent {
        serial: parsed.raw_serial().to_vec(),
        public_key: parsed.public_key().subject_public_key.data.to_vec(),
        begin,
        end,
        role: certified_role(certificate),
    })
}

fn validity_of(certificate: &X509Certificate<'_>) -> (SystemTime, SystemTime) {
    let time = |seconds: i64| UNIX_EPOCH + Duration::from_secs(u64::try_from(seconds).unwrap_or(0));
    let validity = certificate.validity();
    (
        time(validity.not_before.timestamp()),
        time(validity.not_after.timestamp()),
    )
}

/// Returns all problems of the files of `config`. The certificate must belong to the node `owner`; without an owner, to
/// any member.
pub fn find_problems(config: &TlsConfig, owner: Option<&str>) -> Vec<TlsError> {
    let mut problems = Vec::new();
    let chain = read_certificates(&config.cert);
    let chain = chain.map_err(|error| problems.push(error));
    let key = PrivateKeyDer::from_pem_file(&config.key).map_err(file_error(&config.key));
    problems.extend(key.err());
    problems.extend(read_certificates(&config.ca).err());
    problems.extend((config.crl.as_deref()).and_then(|path| read_revocations(path).err()));
    let mode = std::fs::metadata(&config.key).map(|found| found.mode());
    if mode.is_ok_and(|mode| mode & ACCESS_BY_ALL != 0) {
        problems.push(TlsError::ExposedKey(config.key.clone()));
    }
    let Ok(chain) = chain else { return problems };
    problems.extend(check_owner(config, &chain, owner).err());
    if problems
        .iter()
        .any(|error| matches!(error, TlsError::File { .. } | TlsError::Empty { .. }))
    {
        return problems;
    }
    let path = config.cert.clone();
    let built = read_configured_revocations(config)
        .and_then(|lists| build(config, chain.clone(), lists, owner.is_none()));
    match built {
        Ok(tls) => {
            let refusal = tls.admits(&chain).err();
            problems.extend(refusal.map(|problem| TlsError::Refused { path, problem }));
        }
        Err(error) => problems.push(error),
    }
    problems
}

/// Reads this member's certificates, which must belong to the node `owner`; without an owner, to any member.
fn read_owned_chain(
    config: &TlsConfig,
    owner: Option<&str>,
) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let chain = read_certificates(&config.cert)?;
    check_owner(config, &chain, owner)?;
    Ok(chain)
}

/// Checks that a certificate belongs to the node `owner`; without an owner, to any member.
fn check_owner(
    config: &TlsConfig,
    chain: &[CertificateDer<'_>],
    owner: Option<&str>,
) -> Result<(), TlsError> {
    let certificate_owner = chain.first().and_then(node_name);
    match owner {
        None if certificate_owner.is_none() => Err(TlsError::NoMemberName(config.cert.clone())),
        Some(ours) if certificate_owner.as_deref() != Some(ours) => Err(TlsError::OtherName {
            path: config.cert.clone(),
            ours: ours.to_owned(),
            theirs: certificate_owner.map_or("no node".to_owned(), |name| format!("node `{name}`")),
        }),
        _ => Ok(()),
    }
}

fn read_configured_revocations(config: &TlsConfig) -> Result<Revocations, TlsError> {
    let lists = config.crl.as_deref().map(read_revocations).transpose()?;
    Ok(Revocations {
        lists: lists.unwrap_or_default(),
        allows_unlisted: false,
    })
}

/// Builds the configuration. With `accept_any_member`, the remote end of an outgoing connection may be any member of the group.
fn build(
    config: &TlsConfig,
    chain: Vec<CertificateDer<'static>>,
    revocations: Revocations,
    accept_any_member: bool,
) -> Result<Tls, TlsError> {
    let key = PrivateKeyDer::from_pem_file(&config.key).map_err(file_error(&config.key))?;
    let mut roots = RootCertStore::empty();
    let authorities = read_certificates(&config.ca)?;
    let own = certificate_validities(&config.cert, &chain)?;
    let own_end = own.iter().map(|(_, end)| *end).min();
    let authorities_end = certificate_validities(&config.ca, &authorities)?
        .into_iter()
        .map(|(_, end)| end)
        .max();
    let end = own_end.into_iter().chain(authorities_end).min();
    for authority in authorities {
        roots.add(authority).map_err(mismatch)?;
    }
    let roots = Arc::new(roots);
    let provider: Arc<CryptoProvider> = Arc::new(rustls::crypto::ring::default_provider());
    let Revocations {
        lists,
        allows_unlisted,
    } = revocations;
    let mut verifier = WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone())
        .with_crls(lists.clone());
    let mut server_verifier =
        WebPkiServerVerifier::builder_with_provider(roots, provider.clone()).with_crls(lists);
    if allows_unlisted {
        verifier = verifier.allow_unknown_revocation_status();
        server_verifier = server_verifier.allow_unknown_revocation_status();
    }
    let verifier = verifier.build().map_err(mismatch)?;
    let server_verifier = server_verifier.build().map_err(mismatch)?;
    let any_member_verifier = Arc::new(AnyMemberVerifier(server_verifier.clone()));
    let client_config = |accept_any_member: bool| {
        let client = ClientConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&TLS13])
            .map_err(mismatch)?;
        let client = match accept_any_member {
            true => client
                .dangerous()
                .with_custom_certificate_verifier(any_member_verifier.clone()),
            false => client.with_webpki_verifier(server_verifier.clone()),
        };
        let mut client = client
            .with_client_auth_cert(chain.clone(), key.clone_key())
            .map_err(mismatch)?;
        client.resumption = Resumption::disabled();
        client.enable_sni = !accept_any_member;
        Ok::<_, TlsError>(Arc::new(client))
    };
    let any_member_client = client_config(true)?;
    let client = match accept_any_member {
        true => any_member_client.clone(),
        false => client_config(false)?,
    };
    let mut server = ServerConfig::builder_with_provider(provider.clone())
        .with_protocol_versions(&[&TLS13])
        .map_err(mismatch)?
        .with_client_cert_verifier(verifier.clone())
        .with_single_cert(chain, key)
        .map_err(mismatch)?;
    server.send_tls13_tickets = 0;
    Ok(Tls {
        client,
        any_member_client,
        server: Arc::new(server),
        verifier,
        own_validity: own.first().copied().unwrap_or((UNIX_EPOCH, UNIX_EPOCH)),
        end: end.unwrap_or(UNIX_EPOCH),
    })
}

/// Returns begin and end of the validity of each certificate in a file.
fn certificate_validities(
    path: &Path,
    certificates: &[CertificateDer<'_>],
) -> Result<Vec<(SystemTime, SystemTime)>, TlsError> {
    let validity = |certificate: &CertificateDer<'_>| {
        let (_, parsed) = x509_parser::parse_x509_certificate(certificate).map_err(|error| {
            TlsError::Malformed {
                path: path.to_owned(),
                problem: error.to_string(),
            }
        })?;
        Ok(validity_of(&parsed))
    };
    certificates.iter().map(validity).collect()
}

/// Reads all certificates in a file.
///
/// # Errors
/// The file is missing or damaged, or has none.
pub fn read_certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    read_pem(path, "certificate")
}

/// Reads a revocation list. An empty file is an error, since it would revoke nothing, unnoticed.
fn read_revocations(path: &Path) -> Result<Vec<CertificateRevocationListDer<'static>>, TlsError> {
    read_pem(path, "revocation list")
}

fn read_pem<T: PemObject>(path: &Path, content: &'static str) -> Result<Vec<T>, TlsError> {
    let items: Vec<T> = T::pem_file_iter(path)
        .map_err(file_error(path))?
        .collect::<Result<_, _>>()
        .map_err(file_error(path))?;
    match items.is_empty() {
        true => Err(TlsError::Empty {
            path: path.to_owned(),
            content,
        }),
        false => Ok(items),
    }
}

fn file_error(path: &Path) -> impl Fn(pem::Error) -> TlsError {
    let path = path.to_owned();
    move |source| TlsError::File {
        path: path.clone(),
        source,
    }
}

fn mismatch(error: impl std::fmt::Display) -> TlsError {
    TlsError::Mismatch(error.to_string())
}

#[cfg(test)]
mod tests {
    use holdfast_api::ca::CertificateAuthority;

    use super::*;

    #[test]
    fn trust_ends_with_the_first_certificate_to_end() {
        let directory = tempfile::tempdir().unwrap();
        let authority = CertificateAuthority::init(directory.path(), "files").unwrap();
        let issued = authority.issue("n1", &[], 2).unwrap();
        let config = TlsConfig {
            ca: directory.path().join("ca.pem"),
            cert: issued.cert,
            key: issued.key,
            crl: None,
        };
        let tls = Tls::from_files(&config, "n1").unwrap();
        let left = tls.end().duration_since(SystemTime::now()).unwrap();
        let day = Duration::from_secs(24 * 60 * 60);
        assert!(left > day && left <= 2 * day, "{left:?}");
    }
}
