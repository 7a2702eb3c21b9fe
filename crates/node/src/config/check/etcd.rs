//! Checks `group.store` and `[etcd]`.

use std::path::{Path, PathBuf};

use toml::Spanned;

use super::super::sections::{EtcdConfigSection, NodeFile, StoreKey};
use super::super::{ConfigError, EtcdConfig, EtcdEndpoint};
use super::ConfigChecker;

const ENDPOINTS_MAX: usize = 9;
const PREFIX_DEFAULT: &str = "/holdfast/";
const PREFIX_BYTES_MAX: usize = 256;
const USER_BYTES_MAX: usize = 256;

impl ConfigChecker<'_> {
    /// Returns the store of the group's views; none if the voters vote.
    pub(super) fn view_store(&self, raw: &NodeFile) -> Result<Option<EtcdConfig>, ConfigError> {
        let store = raw.group.store.as_ref();
        let is_etcd = store.is_some_and(|store| *store.get_ref() == StoreKey::Etcd);
        match (&raw.etcd, store.filter(|_| is_etcd)) {
            (Some(etcd), Some(_)) => self.etcd(etcd).map(Some),
            (None, Some(store)) => {
                let problem = "store `etcd` needs section [etcd]".to_owned();
                let advice = "add the section, with the `endpoints` of etcd";
                Err(self.file.error_for(store, problem, advice))
            }
            (Some(etcd), None) => {
                let problem = "section [etcd] has no effect".to_owned();
                let advice = "remove the section, or write store = \"etcd\" into section [group]";
                Err(self.file.error_for(&etcd.endpoints, problem, advice))
            }
            (None, None) => Ok(None),
        }
    }

    fn etcd(&self, raw: &EtcdConfigSection) -> Result<EtcdConfig, ConfigError> {
        let count = raw.endpoints.get_ref().len();
        if !(1..=ENDPOINTS_MAX).contains(&count) {
            let problem = format!("there are {count} endpoints");
            let advice = format!("name 1 to {ENDPOINTS_MAX} members of etcd");
            return Err(self.file.error_for(&raw.endpoints, problem, &advice));
        }
        let endpoints = raw.endpoints.get_ref().iter();
        let endpoints = endpoints.map(|url| self.etcd_endpoint(url));
        let endpoints = endpoints.collect::<Result<Vec<_>, _>>()?;
        let is_tls = endpoints.iter().any(|endpoint| endpoint.is_tls);
        if is_tls && raw.ca.is_none() {
            let problem = "an endpoint with https needs `ca`".to_owned();
            let advice =
                "name the file with the certificate of the authority of etcd's certificates";
            return Err(self.file.error_for(&raw.endpoints, problem, advice));
        }
        if raw.certificate.is_some() != raw.key.is_some() {
            let problem = "`certificate` and `key` need each other".to_owned();
            let advice = "name both, or neither";
            return Err(self.file.error_for(&raw.endpoints, problem, advice));
        }
        if raw.user.is_some() != raw.password_file.is_some() {
            let problem = "`user` and `password_file` need each other".to_owned();
            let advice = "name both, or neither";
            return Err(self.file.error_for(&raw.endpoints, problem, advice));
        }
        Ok(EtcdConfig {
            endpoints,
            prefix: self.etcd_prefix(raw.prefix.as_ref())?,
            ca: self.resolve_path(raw.ca.as_ref()),
            certificate: self.resolve_path(raw.certificate.as_ref()),
            key: self.resolve_path(raw.key.as_ref()),
            user: raw
                .user
                .as_ref()
                .map(|user| self.etcd_user(user))
                .transpose()?,
            password_file: self.resolve_path(raw.password_file.as_ref()),
        })
    }

    fn etcd_endpoint(&self, url: &Spanned<String>) -> Result<EtcdEndpoint, ConfigError> {
        EtcdEndpoint::parse(url.get_ref()).ok_or_else(|| {
            let problem = format!("`{}` is not the URL of an endpoint", url.get_ref());
            let advice = "write scheme, host and port: \"https://10.0.0.21:2379\"";
            self.file.error_for(url, problem, advice)
        })
    }

    fn etcd_prefix(&self, raw: Option<&Spanned<String>>) -> Result<String, ConfigError> {
        let Some(prefix) = raw else {
            return Ok(PREFIX_DEFAULT.to_owned());
        };
        let text = prefix.get_ref();
        let is_plain = text.bytes().all(|byte| byte.is_ascii_graphic());
        if !is_plain || text.is_empty() || text.len() > PREFIX_BYTES_MAX {
            let problem = format!("`{text}` is not the beginning of a key");
            let advice = format!(
                "write 1 to {PREFIX_BYTES_MAX} visible ASCII characters, such as \"/holdfast/\""
            );
            return Err(self.file.error_for(prefix, problem, &advice));
        }
        Ok(text.clone())
    }

    fn etcd_user(&self, user: &Spanned<String>) -> Result<String, ConfigError> {
        let text = user.get_ref();
        if text.is_empty() || text.len() > USER_BYTES_MAX {
            let problem = "the name of the user has an impossible length".to_owned();
            let advice = format!("write 1 to {USER_BYTES_MAX} bytes");
            return Err(self.file.error_for(user, problem, &advice));
        }
        Ok(text.clone())
    }

    /// Returns the path of a file, which is relative to the directory of the configuration.
    fn resolve_path(&self, path: Option<&PathBuf>) -> Option<PathBuf> {
        let directory = self.file.path().parent().unwrap_or(Path::new(""));
        path.map(|path| directory.join(path))
    }
}
