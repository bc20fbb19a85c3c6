// A SPANK plugin that takes the options of Pyxis which our scripts use, and starts no container: a step runs on the
// node itself. What each task was given goes into the file that plugstack.conf names.
#include <slurm/spank.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

SPANK_PLUGIN(fake_pyxis, 1)

static const struct { const char *name; int has_value; } OPTIONS[] = {
    {"container-image", 1}, {"container-mounts", 1}, {"container-workdir", 1}, {"no-container-mount-home", 0},
    {"container-env", 1}};
enum { COUNT = sizeof OPTIONS / sizeof *OPTIONS };

static char given[16384];

static int take(int option, const char *value, int remote) {
    (void)remote;
    size_t used = strlen(given);
    snprintf(given + used, sizeof given - used, " --%s%s%s", OPTIONS[option].name, value ? "=" : "", value ? value : "");
    return 0;
}

int slurm_spank_init(spank_t spank, int count, char **arguments) {
    (void)count, (void)arguments;
    for (int i = 0; i < COUNT; i++) {
        struct spank_option option = {(char *)OPTIONS[i].name, OPTIONS[i].has_value ? "VALUE" : NULL,
                                      (char *)"taken, and nothing is done", OPTIONS[i].has_value, i, take};
        spank_option_register(spank, &option);
    }
    return 0;
}

int slurm_spank_task_init(spank_t spank, int count, char **arguments) {
    (void)spank;
    FILE *log = count > 0 && given[0] ? fopen(arguments[0], "a") : NULL;
    if (log) {
        char host[64] = "";
        gethostname(host, sizeof host - 1);
        fprintf(log, "%s%s\n", host, given);
        fclose(log);
    }
    return 0;
}
